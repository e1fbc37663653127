"""All settings: those of the modes, which check each other, and the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
from hvdtrain.errors import ConfigurationError, MismatchError

__all__ = ["ModeSettings", "Settings", "check_in_common"]

_WITH_SERVERS = ("async-ps", "sync-ps")
_OF_LOCAL_SGD = ("sync_every", "outer_learning_rate", "outer_momentum")


@dataclass(frozen=True, kw_only=True)
class ModeSettings:
    """Settings of how ranks train together, and of parameter servers and their workers."""

    mode: str = setting(
        "allreduce",
        one_of("allreduce", "towers", "local-sgd", *_WITH_SERVERS),
        "how ranks train together: allreduce (average gradients), towers (several "
        "devices a rank), local-sgd (average weights), async-ps or sync-ps (parameter servers)",
    )
    devices_per_rank: int = setting(
        1, positive_int, "towers: number of devices that share a rank's batch"
    )
    sync_every: int = setting(
        1, positive_int, "local-sgd: steps between two averages of the weights"
    )
    outer_learning_rate: float = setting(
        1.0, rate, "local-sgd: factor for the move to the average of the weights"
    )
    outer_momentum: float = setting(
        0.0, part_below_one, "local-sgd: Nesterov momentum of that move"
    )
    num_ps: int = setting(1, positive_int, "async-ps, sync-ps: number of parameter servers")
    ps_ranks: tuple[int, ...] = setting(
        (),
        ranks,
        "async-ps, sync-ps: ranks of the parameter servers, such as 2,3; last: the last --num-ps",
        written="last",
    )
    staleness_bound: int | None = setting(
        None,
        count_or("none"),
        "async-ps: maximum steps between a worker and the slowest one; 0: in step",
    )
    overlap: bool = setting(
        False, flag, "async-ps: compute the next gradients while the last ones are sent"
    )
    backup_workers: int = setting(
        0, count, "sync-ps: number of slowest gradients that a step ignores"
    )
    worker_timeout_s: float = setting(
        120.0,
        positive_float,
        "async-ps, sync-ps: seconds to wait for a worker's step before continuing without it",
    )
    update_log: str | None = setting(
        None, path_or_none("folder"), "folder for each parameter server's log of updates"
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
        "library that combines gradients: mpi, nccl, horovod or auto",
    )
    collectives: str = setting(
        "auto",
        one_of("auto", "mpi", "shared_memory"),
        "allreduce over MPI: shared_memory (two levels), mpi (plain) or auto",
    )
    timeout_s: float = setting(
        600.0, positive_float, "seconds to wait for other ranks in a collective before an error"
    )
    chunk_bytes: int | None = setting(
        None,
        count_or("auto", least=1),
        "bytes combined at a time; auto: depends on the number of hosts",
        written="auto",
    )
    bucket_bytes: int | None = setting(
        None,
        count_or("auto"),
        "bytes of gradients sent at a time; 0: all; auto: depends on the link",
        written="auto",
    )
    compression: str = setting(
        "none",
        compression,
        "format of gradients between hosts: none, fp16, bf16, int8 or powersgd:RANK",
    )
    non_finite: str = setting(
        "error",
        one_of("error", "ignore"),
        "reaction to NaN or infinity in gradients: error or ignore",
    )
    # On which devices TensorFlow computes.
    share_gpus: bool = setting(False, flag, "allow more ranks than GPUs on a host")
    soft_placement: bool = setting(
        True, flag, "let TensorFlow use another device for operations that a device lacks"
    )
    log_device_placement: bool = setting(
        False, flag, "print the device of each TensorFlow operation"
    )
    # What happens when ranks die.
    elastic: bool | None = setting(
        None,
        flag_or_auto,
        "continue with the remaining ranks when one dies; auto: with parameter servers; "
        "needs Open MPI 5",
        written="auto",
    )
    min_np: int = setting(1, positive_int, "minimum number of ranks to continue or restart with")
    # What is written about the training.
    timeline_filename: str | None = setting(
        None, path_or_none("file"), "trace file of rank 0; with {rank} in its name, of each rank"
    )
    log_level: str = setting(
        "info",
        log_level,
        "lowest level of hvdtrain's messages to print: debug, info, warning or error",
    )
    log_with_timestamp: bool = setting(
        False, flag, "start hvdtrain's messages with the time and the rank"
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


def check_in_common(everyone: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have the same settings; with the same result on all of them.

    Args:
        everyone: ``Settings.in_common`` of each rank, in their order.

    Raises:
        MismatchError: They don't; names the first variable that differs, and two ranks.
    """
    for variable, first in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs[variable] != first:
                raise MismatchError(
                    f"{variable} is {first} on rank 0 and {theirs[variable]} on rank {rank}, and "
                    "all ranks must train in one way. Give it as a flag of hvdtrain run, or set it "
                    f"for all ranks: mpirun -x {variable} passes it on to other hosts."
                )
