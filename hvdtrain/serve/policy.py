"""The policy on what may be started from the page: lists of folders, programs and backends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import JobError
from hvdtrain.jobs.spec import JobSpec

__all__ = ["Policy"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy on what may be started; empty lists allow nothing.

    Attributes:
        folders: Working directories, and all below them.
        programs: Programs, as they are written.
        backends: Who may run them, as ``BackendKind`` names it.
    """

    folders: Sequence[Path] = ()
    programs: Sequence[str] = ()
    backends: Sequence[str] = ()

    @property
    def allows_something(self) -> bool:
        """Whether anything may be started."""
        return bool(self.folders and self.programs and self.backends)

    def check(self, spec: JobSpec) -> None:
        """Raise unless a job may be started.

        Raises:
            JobError: It may not; the message says what may.
        """
        backend = spec.backend.kind
        if backend not in self.backends:
            raise JobError(_refusal("backend", backend, self.backends, "--allow-backend"))
        folder = Path(os.path.realpath(spec.folder))
        if not any(folder.is_relative_to(os.path.realpath(allowed)) for allowed in self.folders):
            allowed = [str(path) for path in self.folders]
            raise JobError(_refusal("folder", str(folder), allowed, "--allow-folder"))
        if not spec.program or spec.program[0] not in self.programs:
            first = spec.program[0] if spec.program else ""
            raise JobError(_refusal("program", first, self.programs, "--allow-program"))


def _refusal(what: str, got: str, allowed: Sequence[str], flag: str) -> str:
    known = ", ".join(allowed) or "none"
    return f"the {what} {got!r} may not be used from the page; allowed: {known} ({flag} adds one)"
