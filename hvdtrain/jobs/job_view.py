"""What there is to show of a job, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hvdtrain.errors import JobError
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.state import Status

__all__ = ["JobView", "span", "view_job"]

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job as it is now.

    Attributes:
        name: Its name.
        status: What is true of it now.
        program: The program that its ranks run; empty where that can't be read.
        options: The options of ``hvdtrain run``.
        folder: Its working directory.
        created_s: When it was asked for, in seconds since 1970.
        ended_s: When it ended; None if it has not.
        attempt: How often its ranks were started.
        ranks: How many there are.
        hosts: How many of them run on each host.
        step: Optimizer steps that are complete; None for none.
        epoch: The epoch of the last step.
        saved: Step of the newest checkpoint.
        code: The exit code, once it has ended.
        verdict: What was said of its end.
    """

    name: str
    status: Status
    program: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    folder: str = ""
    created_s: float = 0.0
    ended_s: float | None = None
    attempt: int = 0
    ranks: int = 0
    hosts: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    saved: int | None = None
    code: int | None = None
    verdict: str = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs or will run."""
        return self.status not in ("queued", "running", "restarting", "silent")

    def to_json(self) -> Mapping[str, Any]:
        """For programs."""
        return asdict(self)


def view_job(job: JobFolder) -> JobView:
    """What there is to show of a job; what can't be read is left out."""
    state = job.state()
    status = job.status(state)
    known: dict[str, Any] = {"name": job.name, "status": status, "created_s": job.created_s()}
    try:
        spec = job.spec()
        known |= {"program": spec.program, "options": spec.options, "folder": spec.folder}
        known["created_s"] = spec.created_s
    except JobError:
        pass
    if state is not None:
        same = ("attempt", "ranks", "hosts", "step", "epoch", "saved", "code", "verdict")
        known |= {name: getattr(state, name) for name in same}
        if state.phase == "ended":
            known["ended_s"] = state.since_s
        elif status == "lost":
            known["ended_s"] = job.heard_s()
            known["verdict"] = _lost(job)
    return JobView(**known)


def _lost(job: JobFolder) -> str:
    said = "its hvdtrain run is gone and left no word: it was killed, or its host went down"
    words = job.last_words()
    return f"{said}\nits last words:\n{words}" if words else said


def span(seconds: float) -> str:
    """A length of time, to two parts: ``3 h 5 min``."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for size, unit in _UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if not part.startswith("0 ")) or "0 s"
