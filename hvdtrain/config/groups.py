"""All settings: those of the modes, which check each other, and the others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hvdtrain.config.fields import (
    compression,
    count,
    count_or,
    flag,
    flag_name,
    flag_or_auto,
    log_level,
    one_of,
    part_below_one,
    path_or_none,
    positive_float,
    positive_int,
    ranks,
    rate,
    setting,
    variable_name,
)
from hvdtrain.errors import ConfigurationError

__all__ = ["ModeSettings", "Settings"]

_WITH_SERVERS = ("async-ps", "sync-ps")
_OF_LOCAL_SGD = ("sync_every", "outer_learning_rate", "outer_momentum")


@dataclass(frozen=True, kw_only=True)
class ModeSettings:
    """Settings of how ranks train together, and of parameter servers and their workers."""

    mode: str = setting(
        "allreduce",
        one_of("allreduce", "towers", "local-sgd", *_WITH_SERVERS),
        "allreduce: ranks average gradients; towers: on several devices; local-sgd: weights; "
        "async-ps, sync-ps: through servers",
    )
    devices_per_rank: int = setting(
        1, positive_int, "towers: on how many devices a rank computes parts of its batch"
    )
    sync_every: int = setting(
        1, positive_int, "local-sgd: steps from one average of weights to the next"
    )
    outer_learning_rate: float = setting(
        1.0, rate, "local-sgd: how far weights go towards their average"
    )
    outer_momentum: float = setting(
        0.0, part_below_one, "local-sgd: Nesterov momentum of these moves"
    )
    num_ps: int = setting(
        1, positive_int, "how many ranks are parameter servers, in modes that have them"
    )
    ps_ranks: tuple[int, ...] = setting(
        (), ranks, "which ranks they are, like 2,3, or last: the last --num-ps", written="last"
    )
    staleness_bound: int | None = setting(
        None, count_or("none"), "async-ps: most steps ahead of the slowest worker; 0: in step"
    )
    overlap: bool = setting(
        False, flag, "1 lets workers of async-ps compute while their gradients travel"
    )
    backup_workers: int = setting(
        0, count, "sync-ps: without how many of the slowest gradients a step does"
    )
    worker_timeout_s: float = setting(
        120.0, positive_float, "seconds before the others no longer wait for a worker's step"
    )
    update_log: str | None = setting(
        None, path_or_none("folder"), "folder in which each parameter server logs its updates"
    )

    @property
    def has_servers(self) -> bool:
        """Whether some ranks are parameter servers."""
        return self.mode in _WITH_SERVERS

    @property
    def towers(self) -> int:
        """The number of devices that a rank that trains computes on."""
        return self.devices_per_rank if self.mode == "towers" else 1

    @property
    def is_local_sgd(self) -> bool:
        """Whether each rank makes steps of its own, and weights are averaged."""
        return self.mode == "local-sgd"

    @property
    def in_common(self) -> dict[str, str]:
        """The settings that ranks that train without servers must have in common, as variables."""
        names = ("mode", *_OF_LOCAL_SGD)
        return {variable_name(name): f"{getattr(self, name)}" for name in names}

    @property
    def gathers(self) -> bool:
        """Whether servers make an update of several workers' gradients."""
        return self.mode == "sync-ps" or (self.mode == "async-ps" and self.staleness_bound == 0)

    def gradients_in_update(self, workers: int) -> int:
        """Return how many ranks' gradients make one update of the weights, of so many workers."""
        if not self.has_servers:
            return workers
        if not self.gathers:
            return 1
        return workers - (self.backup_workers if self.mode == "sync-ps" else 0)

    def check(self) -> None:
        """Raise ``ConfigurationError`` where the settings contradict each other."""
        self._check_towers()
        self._check_local_sgd()
        self._check_overlap()

    def _check_towers(self) -> None:
        if self.devices_per_rank != self.towers:
            raise ConfigurationError(
                f"{self.devices_per_rank} devices a rank (--devices-per-rank, "
                f"{variable_name('devices_per_rank')}) are for --mode towers, and this is mode "
                f"{self.mode}. Give --mode towers ({variable_name('mode')}), or leave it out."
            )

    def _check_local_sgd(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.name in _OF_LOCAL_SGD and value != entry.default and not self.is_local_sgd:
                option = flag_name(entry.name)
                raise ConfigurationError(
                    f"{option} {value:g} ({variable_name(entry.name)}) is for --mode local-sgd, "
                    f"and this is mode {self.mode}. Give --mode local-sgd "
                    f"({variable_name('mode')}), or leave {option} out."
                )

    def _check_overlap(self) -> None:
        reason = self._why_no_overlap()
        if self.overlap and reason:
            raise ConfigurationError(
                f"--overlap ({variable_name('overlap')}) lets a worker go on while its gradient is "
                f"under way, and {reason}. Leave it out, or give --mode async-ps without "
                "--staleness-bound 0."
            )

    def _why_no_overlap(self) -> str:
        """Return why workers must wait for the answer to a gradient; empty where they needn't."""
        if self.mode != "async-ps":
            return f"in mode {self.mode} there is nothing that it could go on without"
        if self.staleness_bound == 0:
            return "with a staleness bound of 0 no worker may be a step ahead"
        return ""


# The fields of a base come first: so are flags and tables ordered.
@dataclass(frozen=True, kw_only=True)
class Settings(ModeSettings):
    """All that a rank can be told; each field is read from ``HVDTRAIN_<NAME IN CAPITALS>``."""

    # What combines gradients and other values of the ranks.
    backend: str = setting(
        "auto",
        one_of("auto", "mpi", "nccl", "horovod"),
        "what combines gradients: mpi, nccl, horovod, or auto",
    )
    collectives: str = setting(
        "auto",
        one_of("auto", "mpi", "shared_memory"),
        "with MPI: shared_memory (in two levels), mpi (plain), auto",
    )
    timeout_s: float = setting(
        600.0, positive_float, "seconds a rank waits for others in a collective, then fails"
    )
    chunk_bytes: int | None = setting(
        None,
        count_or("auto", least=1),
        "bytes combined at a time; auto: by the hosts",
        written="auto",
    )
    bucket_bytes: int | None = setting(
        None,
        count_or("auto"),
        "bytes of gradients sent at a time; 0: all; auto: by the link",
        written="auto",
    )
    compression: str = setting(
        "none",
        compression,
        "form of gradients between hosts: none, fp16, bf16, int8, powersgd:RANK",
    )
    non_finite: str = setting(
        "error",
        one_of("error", "ignore"),
        "what NaN or infinity in gradients does: error, ignore",
    )
    # On which devices TensorFlow computes.
    share_gpus: bool = setting(
        False, flag, "1 lets more ranks than GPUs run on a host and share them"
    )
    soft_placement: bool = setting(
        True, flag, "1 lets TensorFlow compute elsewhere what a device can't"
    )
    log_device_placement: bool = setting(
        False, flag, "1 lets TensorFlow print what it computes on which device"
    )
    # What happens when ranks die.
    elastic: bool | None = setting(
        None,
        flag_or_auto,
        "1 lets the ranks that are left go on when one dies; auto: with parameter servers; needs "
        "Open MPI 5",
        written="auto",
    )
    min_np: int = setting(
        1, positive_int, "how many ranks have to be left to go on or to start again"
    )
    # What is written about the training.
    timeline_filename: str | None = setting(
        None, path_or_none("file"), "file for a trace of rank 0; with {rank} in it: of each rank"
    )
    log_level: str = setting(
        "info", log_level, "what hvdtrain itself prints: debug, info, warning, error"
    )
    log_with_timestamp: bool = setting(
        False, flag, "1 puts time and rank before what hvdtrain itself prints"
    )

    def check(self) -> None:
        super().check()
        if self.compression != "none" and (self.has_servers or self.is_local_sgd):
            raise ConfigurationError(
                f"--compression {self.compression} ({variable_name('compression')}) is for "
                f"gradients that ranks average among each other, and this is mode {self.mode}. "
                "Leave it out, or leave --mode out."
            )

    @property
    def goes_on_without(self) -> bool:
        """Whether ranks are to go on without one that dies, where that can be had."""
        return self.has_servers if self.elastic is None else self.elastic
