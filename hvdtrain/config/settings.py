"""All settings, and checks that they don't contradict each other."""

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
    fraction,
    log_level,
    one_of,
    path_or_none,
    positive_float,
    positive_int,
    ranks,
    rate,
    setting,
    variable_name,
)
from hvdtrain.errors import ConfigurationError, MismatchError

__all__ = ["ModeSettings", "Settings", "check_common_variables"]

_SERVER_MODES = ("async-ps", "sync-ps")
_LOCAL_SGD_SETTINGS = ("sync_every", "outer_learning_rate", "outer_momentum")


@dataclass(frozen=True, kw_only=True)
class ModeSettings:
    """Settings of the training mode."""

    mode: str = setting(
        "allreduce",
        one_of("allreduce", "towers", "local-sgd", *_SERVER_MODES),
        "how ranks train together: allreduce (average gradients), towers (several devices per "
        "rank), local-sgd (average weights), async-ps or sync-ps (parameter servers)",
    )
    devices_per_rank: int = setting(1, positive_int, "towers: number of devices per rank")
    sync_every: int = setting(
        1, positive_int, "local-sgd: number of steps between averages of the weights"
    )
    outer_learning_rate: float = setting(
        1.0, rate, "local-sgd: learning rate of the outer step (toward the averaged weights)"
    )
    outer_momentum: float = setting(0.0, fraction, "local-sgd: Nesterov momentum of the outer step")
    num_ps: int = setting(1, positive_int, "async-ps, sync-ps: number of parameter servers")
    ps_ranks: tuple[int, ...] = setting(
        (),
        ranks,
        "async-ps, sync-ps: ranks of the parameter servers, such as 2,3; last: the last "
        "--num-ps ranks",
        written="last",
    )
    staleness_bound: int | None = setting(
        None,
        count_or("none"),
        "async-ps: maximum number of steps ahead of the slowest worker; 0: lockstep; none: "
        "unlimited",
    )
    overlap: bool = setting(
        False, flag, "async-ps: compute the next gradients while the previous ones are sent"
    )
    backup_workers: int = setting(
        0, count, "sync-ps: number of slowest workers to ignore in each step"
    )
    worker_timeout_s: float = setting(
        120.0,
        positive_float,
        "async-ps, sync-ps: seconds to wait for a worker before continuing without it",
    )
    update_log: str | None = setting(
        None,
        path_or_none("folder"),
        "async-ps, sync-ps: folder for the update logs of the parameter servers",
    )

    @property
    def has_servers(self) -> bool:
        """Whether some ranks are parameter servers."""
        return self.mode in _SERVER_MODES

    @property
    def towers(self) -> int:
        """Number of devices that each training rank uses."""
        return self.devices_per_rank if self.mode == "towers" else 1

    @property
    def is_local_sgd(self) -> bool:
        """Whether ranks train independently and average their weights from time to time."""
        return self.mode == "local-sgd"

    @property
    def common_variables(self) -> dict[str, str]:
        """The settings that must be the same on all ranks, unless the job has parameter servers.

        The keys are the names of the environment variables.
        """
        names = ("mode", *_LOCAL_SGD_SETTINGS)
        return {variable_name(name): f"{getattr(self, name)}" for name in names}

    @property
    def gathers(self) -> bool:
        """Whether parameter servers combine the gradients of several workers into an update."""
        return self.mode == "sync-ps" or (self.mode == "async-ps" and self.staleness_bound == 0)

    def gradients_in_update(self, workers: int) -> int:
        """Return the number of workers whose gradients are combined into an update."""
        if not self.has_servers:
            return workers
        if not self.gathers:
            return 1
        return workers - (self.backup_workers if self.mode == "sync-ps" else 0)

    def check(self) -> None:
        """Check that settings don't contradict each other.

        Raises:
            ConfigurationError: If settings contradict each other.
        """
        only_for = {"devices_per_rank": "towers", **dict.fromkeys(_LOCAL_SGD_SETTINGS, "local-sgd")}
        for entry in dataclasses.fields(self):
            value, mode = getattr(self, entry.name), only_for.get(entry.name, self.mode)
            if mode != self.mode and value != entry.default:
                option = flag_name(entry.name)
                raise ConfigurationError(
                    f"{option} {value:g} ({variable_name(entry.name)}) needs --mode {mode}, but "
                    f"the mode is {self.mode}. Pass --mode {mode} ({variable_name('mode')}), or "
                    f"omit {option}."
                )
        if self.overlap and (self.mode != "async-ps" or self.staleness_bound == 0):
            mode = self.mode + (" with --staleness-bound 0" if self.mode == "async-ps" else "")
            raise ConfigurationError(
                f"--overlap ({variable_name('overlap')}) is not possible in mode {mode}, in which "
                "workers wait for each update. Omit it, or pass --mode async-ps without "
                "--staleness-bound 0."
            )


# Fields of the base class come first, also in the help and in docs/settings.md.
@dataclass(frozen=True, kw_only=True)
class Settings(ModeSettings):
    """All settings of a rank; each field is read from ``HVDTRAIN_<FIELD>``."""

    # Communication.
    backend: str = setting(
        "auto",
        one_of("auto", "mpi", "nccl", "horovod"),
        "library that combines gradients: mpi, nccl, horovod or auto",
    )
    collectives: str = setting(
        "auto",
        one_of("auto", "mpi", "shared_memory"),
        "transport of collectives: shared_memory (on each host, with MPI between hosts), mpi "
        "(only MPI) or auto",
    )
    timeout_s: float = setting(
        600.0, positive_float, "seconds to wait for other ranks in a collective before failing"
    )
    chunk_bytes: int | None = setting(
        None,
        count_or("auto", minimum=1),
        "bytes per chunk of an allreduce; auto: depends on the number of hosts",
        written="auto",
    )
    bucket_bytes: int | None = setting(
        None,
        count_or("auto"),
        "bytes per bucket of gradients between hosts or from GPUs; 0: a single bucket; auto: "
        "depends on the link",
        written="auto",
    )
    compression: str = setting(
        "none",
        compression,
        "format of sent gradients: none, fp16, bf16, int8 or powersgd:RANK",
    )
    non_finite: str = setting(
        "error",
        one_of("error", "ignore"),
        "action on NaN or infinity in gradients: error or ignore",
    )
    # Devices.
    share_gpus: bool = setting(False, flag, "allow more ranks than GPUs on a host")
    soft_placement: bool = setting(
        True, flag, "run an operation on another device if its device does not support it"
    )
    log_device_placement: bool = setting(
        False, flag, "print the device of each TensorFlow operation"
    )
    # Lost ranks.
    elastic: bool | None = setting(
        None,
        flag_or_auto,
        "continue with the remaining ranks when one dies (needs Open MPI 5); auto: on with "
        "parameter servers, otherwise off",
        written="auto",
    )
    min_np: int = setting(1, positive_int, "minimum number of ranks to continue or restart with")
    # Logs.
    timeline_filename: str | None = setting(
        None,
        path_or_none("file"),
        "trace file of rank 0, or of each rank if the name contains {rank}",
    )
    log_level: str = setting(
        "info",
        log_level,
        "minimum level of hvdtrain's log messages: debug, info, warning or error",
    )
    log_with_timestamp: bool = setting(
        False, flag, "prefix hvdtrain's log messages with the time and the rank"
    )

    def check(self) -> None:
        """Check that settings don't contradict each other.

        Raises:
            ConfigurationError: If settings contradict each other.
        """
        super().check()
        if self.compression != "none" and (self.has_servers or self.is_local_sgd):
            raise ConfigurationError(
                f"--compression {self.compression} ({variable_name('compression')}) needs a mode "
                f"in which ranks average gradients, but the mode is {self.mode}. Omit one of them."
            )

    @property
    def tolerates_lost_ranks(self) -> bool:
        """Whether the other ranks should continue when a rank dies, if MPI supports that."""
        return self.has_servers if self.elastic is None else self.elastic


def check_common_variables(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have the same settings. The result is the same on all ranks.

    ``by_rank`` contains the ``Settings.common_variables`` of each rank.

    Raises:
        MismatchError: If a variable differs between ranks.
    """
    for variable, first in by_rank[0].items():
        for rank, variables in enumerate(by_rank):
            if variables[variable] != first:
                raise MismatchError(
                    f"{variable} must be the same on all ranks, got {first} on rank 0 and "
                    f"{variables[variable]} on rank {rank}. Pass it as a flag of hvdtrain run, or "
                    f"set it for all ranks: mpirun -x {variable} passes it to other hosts."
                )
