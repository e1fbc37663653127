"""Every setting once: its name, environment variable, default, accepted values and help.

Precedence is flag, then environment, then default. The launcher turns flags into these
variables; ranks read them back here, so that both sides share one definition and no import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import ConfigurationError

__all__ = [
    "COLUMNS",
    "LAUNCHER",
    "PREFIX",
    "REPORT_FD",
    "Settings",
    "read_settings",
    "variable_name",
    "written_default",
]

PREFIX = "HVDTRAIN_"
# Set for the ranks by ``hvdtrain run``: where it listens, its addresses with one port
# ("10.0.0.1 192.168.1.1 4711"); and the width of the terminal that shows their output, if any.
LAUNCHER = PREFIX + "LAUNCHER"
COLUMNS = PREFIX + "COLUMNS"
# The open file in which a rank's program tells how far it is, and its inode ("7:4711"), so that
# a number that means another file by then is not written to.
REPORT_FD = PREFIX + "REPORT_FD"

_WITH_SERVERS = ("async-ps", "sync-ps", "easgd")
# Settings that say what servers do with gradients, and those that ask for servers that apply each
# one as it comes.
_OF_GRADIENTS = ("dc_asgd", "staleness_scaling")
_SINGLE_GRADIENTS = ("dc_asgd", "push_every")


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("expected a number above 0")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("expected a number, 0 or more")
    return value


def _part(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("expected a number from 0 to 1")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError("expected a whole number above 0")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("expected a whole number, 0 or more")
    return int(text)


def _count_or_none(text: str) -> int | None:
    if text != "none" and not text.isdecimal():
        raise ValueError("expected a whole number, 0 or more, or none")
    return None if text == "none" else int(text)


def _path_or_none(what: str) -> Callable[[str], str | None]:
    def parse(text: str) -> str | None:
        if not text:
            raise ValueError(f"expected a {what}, or none")
        return None if text == "none" else text

    return parse


def _ranks(text: str) -> tuple[int, ...]:
    if text in ("", "last"):
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError("expected numbers of ranks like 2,3, or last")
    ranks = sorted(map(int, words))
    if len(set(ranks)) < len(ranks):
        raise ValueError("expected each rank once")
    return tuple(ranks)


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 1 or 0")


def _flag_or_auto(text: str) -> bool | None:
    return None if text.strip().lower() == "auto" else _flag(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("expected one of " + ", ".join(choices))
        return text

    return parse


def _log_level(text: str) -> str:
    # Horovod's levels, too, as it writes them.
    word = {"trace": "debug", "fatal": "error"}.get(text.lower(), text.lower())
    return _one_of("debug", "info", "warning", "error")(word)


def _setting(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    *,
    written: str | None = None,
    of_mode: bool = False,
) -> Any:
    """A setting.

    Args:
        default: Its value where nothing is said.
        parse: From text; raises ValueError.
        help: The text that --help and docs/settings.md show.
        written: The default as a user would write it, where that isn't plain.
        of_mode: Whether it says how ranks train together.
    """
    metadata = {
        "parse": parse,
        "help": help,
        "written": written,
        "of_mode": of_mode,
        "is_switch": parse in (_flag, _flag_or_auto),
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a rank can be told; each field is read from ``HVDTRAIN_<NAME IN CAPITALS>``."""

    mode: str = _setting(
        "allreduce",
        _one_of("allreduce", "towers", *_WITH_SERVERS),
        "allreduce: ranks average gradients; towers: so, on several devices each; async-ps, "
        "sync-ps, easgd: through parameter servers",
        of_mode=True,
    )
    devices_per_rank: int = _setting(
        1,
        _positive_int,
        "towers: on how many devices a rank computes parts of its batch",
        of_mode=True,
    )
    num_ps: int = _setting(
        1,
        _positive_int,
        "how many ranks are parameter servers, in modes that have them",
        of_mode=True,
    )
    ps_ranks: tuple[int, ...] = _setting(
        (),
        _ranks,
        "which ranks they are, like 2,3, or last: the last --num-ps",
        written="last",
        of_mode=True,
    )
    staleness_bound: int | None = _setting(
        None,
        _count_or_none,
        "async-ps: most steps ahead of the slowest worker; 0: in step",
        written="none",
        of_mode=True,
    )
    staleness_scaling: bool = _setting(
        False,
        _flag,
        "1 divides the learning rate by the gradient's staleness, in async-ps",
        of_mode=True,
    )
    dc_asgd: float = _setting(
        0.0, _amount, "async-ps: lambda with which stale gradients are corrected", of_mode=True
    )
    push_every: int = _setting(
        1,
        _positive_int,
        "async-ps: steps of a worker whose gradients it sends as a sum; easgd: from one exchange "
        "to the next",
        of_mode=True,
    )
    overlap: bool = _setting(
        False,
        _flag,
        "1 lets workers of async-ps compute while their gradients travel",
        of_mode=True,
    )
    moving_rate: float = _setting(
        0.0,
        _part,
        "easgd: how far both sides move; 0: 0.9 by the number of workers",
        of_mode=True,
    )
    backup_workers: int = _setting(
        0,
        _count,
        "sync-ps: without how many of the slowest gradients a step does",
        of_mode=True,
    )
    worker_timeout_s: float = _setting(
        120.0,
        _positive_float,
        "seconds before the others no longer wait for a worker's step",
        of_mode=True,
    )
    update_log: str | None = _setting(
        None,
        _path_or_none("folder"),
        "folder in which each parameter server logs its updates",
        written="none",
        of_mode=True,
    )
    backend: str = _setting(
        "auto",
        _one_of("auto", "mpi", "nccl", "horovod"),
        "what combines gradients: mpi, nccl, horovod, or auto",
    )
    collectives: str = _setting(
        "auto",
        _one_of("auto", "mpi", "shared_memory"),
        "with MPI: shared_memory (in two levels), mpi (plain), auto",
    )
    timeout_s: float = _setting(
        600.0,
        _positive_float,
        "seconds a rank waits for others in a collective, then fails",
    )
    chunk_bytes: int = _setting(
        2 << 20, _positive_int, "bytes a rank passes through shared memory at a time"
    )
    non_finite: str = _setting(
        "error",
        _one_of("error", "ignore"),
        "what NaN or infinity in a gradient does: error (on every rank, naming it), ignore",
    )
    share_gpus: bool = _setting(
        False, _flag, "1 lets more ranks than GPUs run on a host and share them"
    )
    soft_placement: bool = _setting(
        True,
        _flag,
        "1 lets TensorFlow compute elsewhere what a device can't",
    )
    log_device_placement: bool = _setting(
        False, _flag, "1 lets TensorFlow print what it computes on which device"
    )
    elastic: bool | None = _setting(
        None,
        _flag_or_auto,
        "1 lets the ranks that are left go on when one dies; auto: with parameter servers; needs "
        "Open MPI 5",
        written="auto",
    )
    min_np: int = _setting(
        1,
        _positive_int,
        "how many ranks have to be left to go on or to start again",
    )
    timeline_filename: str | None = _setting(
        None,
        _path_or_none("file"),
        "file for a trace of rank 0; with {rank} in it: of each rank",
        written="none",
    )
    log_level: str = _setting(
        "info",
        _log_level,
        "what hvdtrain itself prints: debug, info, warning, error",
    )
    log_with_timestamp: bool = _setting(
        False, _flag, "1 puts time and rank before what hvdtrain itself prints"
    )

    @property
    def has_servers(self) -> bool:
        """Whether some ranks are parameter servers."""
        return self.mode in _WITH_SERVERS

    @property
    def goes_on_without(self) -> bool:
        """Whether ranks are to go on without one that dies, where that can be had."""
        return self.has_servers if self.elastic is None else self.elastic

    @property
    def towers(self) -> int:
        """On how many devices a rank that trains computes."""
        return self.devices_per_rank if self.mode == "towers" else 1

    @property
    def gathers(self) -> bool:
        """Whether servers make an update of several workers' gradients."""
        return self.mode == "sync-ps" or (self.mode == "async-ps" and self.staleness_bound == 0)

    @property
    def applies_singly(self) -> bool:
        """Whether servers apply each gradient as it comes."""
        return self.has_servers and not self.gathers

    def gradients_in_update(self, workers: int) -> int:
        """How many ranks' gradients one update of the weights is made of, of so many workers."""
        if not self.has_servers:
            return workers
        if not self.gathers:
            return 1
        return workers - (self.backup_workers if self.mode == "sync-ps" else 0)


def variable_name(name: str) -> str:
    """The environment variable that holds the setting ``name``."""
    return PREFIX + name.upper()


def written_default(entry: dataclasses.Field[Any]) -> str:
    """The default of a setting as its flag or its variable would hold it."""
    if entry.metadata["written"] is not None:
        return str(entry.metadata["written"])
    if isinstance(entry.default, bool):
        return "1" if entry.default else "0"
    return f"{entry.default:g}" if isinstance(entry.default, float) else str(entry.default)


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read all settings from ``environ``.

    Raises:
        ConfigurationError: A value can't be parsed, and the message names the variable, what it
            held and what it accepts; or values contradict each other.
    """
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(Settings):
        text = environ.get(variable_name(entry.name))
        if text is None:
            continue
        try:
            values[entry.name] = entry.metadata["parse"](text)
        except ValueError as error:
            name, default = variable_name(entry.name), written_default(entry)
            raise ConfigurationError(
                f"{name}={text!r} can't be used: {error}. It means: {entry.metadata['help']}. "
                f"Unset it for the default, {default}."
            ) from None
    settings = Settings(**values)
    _check_towers(settings)
    _check_servers(settings)
    _check_easgd(settings)
    _check_overlap(settings)
    return settings


def _check_towers(settings: Settings) -> None:
    if settings.devices_per_rank != settings.towers:
        raise ConfigurationError(
            f"{settings.devices_per_rank} devices a rank (--devices-per-rank, "
            f"{variable_name('devices_per_rank')}) are for --mode towers, and this is mode "
            f"{settings.mode}. Give --mode towers ({variable_name('mode')}), or leave it out."
        )


def _check_servers(settings: Settings) -> None:
    if settings.applies_singly:
        return
    bound = " with a staleness bound of 0" if settings.mode == "async-ps" else ""
    for entry in dataclasses.fields(Settings):
        value = getattr(settings, entry.name)
        if entry.name in _SINGLE_GRADIENTS and value != entry.default:
            flag = "--" + entry.name.replace("_", "-")
            raise ConfigurationError(
                f"{flag} {value:g} ({variable_name(entry.name)}) needs parameter servers that "
                f"apply each gradient as it comes, and in mode {settings.mode}{bound} there are "
                f"none. Give --mode async-ps without --staleness-bound 0, or leave {flag} out."
            )


def _check_easgd(settings: Settings) -> None:
    is_easgd = settings.mode == "easgd"
    if settings.moving_rate and not is_easgd:
        raise ConfigurationError(
            f"--moving-rate {settings.moving_rate:g} ({variable_name('moving_rate')}) is for "
            f"--mode easgd, and this is mode {settings.mode}. Give --mode easgd, or leave it out."
        )
    for name in _OF_GRADIENTS:
        if is_easgd and getattr(settings, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigurationError(
                f"{flag} ({variable_name(name)}) corrects stale gradients, and with --mode easgd "
                f"workers send none. Leave {flag} out, or give --mode async-ps."
            )


def _check_overlap(settings: Settings) -> None:
    reason = _why_no_overlap(settings)
    if settings.overlap and reason:
        raise ConfigurationError(
            f"--overlap ({variable_name('overlap')}) lets a worker go on while its gradient is "
            f"under way, and {reason}. Leave it out, or give --mode async-ps, without "
            "--staleness-bound 0 and --dc-asgd."
        )


def _why_no_overlap(settings: Settings) -> str:
    """Why workers have to wait for the answer to a gradient; empty where they needn't."""
    if settings.mode != "async-ps":
        return f"in mode {settings.mode} there is nothing that it could go on without"
    if settings.staleness_bound == 0:
        return "with a staleness bound of 0 no worker may be a step ahead"
    if settings.dc_asgd:
        return "--dc-asgd corrects gradients for the weights that their worker was sent last"
    return ""
