"""Writes checkpoints into a directory, and finds the newest one that is intact."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hvdtrain.checkpoint.durable import make_folders, reason, sync, write_file
from hvdtrain.checkpoint.folders import (
    PATIENCE_S,
    CheckpointFolder,
    aside_name,
    find_complete,
    folder_name,
    keeps_changing,
    new_name,
    remove_folder,
    settle,
    sweep,
)
from hvdtrain.checkpoint.json_state import decode_state, encode_state
from hvdtrain.checkpoint.lock import WriteLock, hold
from hvdtrain.checkpoint.manifest import (
    FILES,
    MANIFEST,
    MODEL,
    RANKS,
    STATE,
    DamagedError,
    check_contents,
    check_sizes,
    encode_manifest,
    file_facts,
    read_manifest,
    read_regular,
)
from hvdtrain.checkpoint.snapshot import Snapshot
from hvdtrain.checkpoint.tensors import check_arrays, read_tensors, write_tensors
from hvdtrain.errors import CheckpointError, ConfigurationError

__all__ = ["Store"]

# The manifest before it counts.
_UNPUBLISHED = ".manifest.json"

# How often a reader looks again at least, however long it takes to read a checkpoint.
_LOOKS = 5

# Reading failed with these: what is on the disk isn't a checkpoint any more. With others, such as
# a lack of permission, it may be intact, and falling back to an older one would lose steps.
_DAMAGE = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.EUCLEAN)


class Store:
    """A directory of checkpoints.

    Everyone may read; the process that has written holds the directory until ``close``, until its
    last Store of the directory is gone, or until it ends, however it ends.

    Args:
        directory: Made, with those above it, when the first checkpoint is written.
        keep: How many checkpoints stay.
        notice: Called with a sentence to show when something is wrong that doesn't stop the work.
        lock_timeout_s: How long ``write`` waits for another process that writes there.

    Raises:
        ConfigurationError: ``keep`` is less than 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        notice: Callable[[str], None] | None = None,
        lock_timeout_s: float = 5.0,
    ) -> None:
        if type(keep) is not int or keep < 1:
            raise ConfigurationError(
                f"keep={keep!r} is not a number of checkpoints to keep; expected an int of at "
                "least 1."
            )
        self._directory = Path(os.path.abspath(directory))
        self._keep = keep
        self._notice = notice or (lambda text: None)
        self._lock_timeout_s = lock_timeout_s
        self._lock: WriteLock | None = None
        self._damaged: set[CheckpointFolder] = set()

    def write(self, snapshot: Snapshot) -> Path:
        """Publish a snapshot and return its folder; it is on the disk then.

        A checkpoint of the same step is replaced. Afterwards only the newest ``keep`` up to this
        step stay.

        Raises:
            CheckpointError: The snapshot can't be stored, the directory can't be written to, or
                another process writes there. What was there before is intact.
        """
        state = _check(snapshot)
        what = f"Checkpoint of step {snapshot.step}"
        try:
            make_folders(self._directory)
            lock = self._locked()
            with lock.mutex:
                sweep(self._directory, alone=lock.alone)
                folder = self._publish(snapshot, state)
        except OSError as error:
            raise CheckpointError(
                f"{what} can't be written to {self._directory}: {reason(error)}. Checkpoints "
                "that were there are intact."
            ) from error
        except CheckpointError as error:
            raise CheckpointError(f"{what} can't be written: {error}") from None
        with lock.mutex:
            self._prune(snapshot.step)
        return folder

    def newest(self) -> Snapshot | None:
        """The newest checkpoint that is intact; None if there has been none.

        Those that are damaged are named through ``notice``.

        Raises:
            CheckpointError: All are damaged, or the directory can't be read.
        """
        try:
            snapshot, problems = self._first_intact()
        except OSError as error:
            self._refuse(error)
        if snapshot is None and problems:
            raise CheckpointError(
                f"No checkpoint in {self._directory} is intact: {'; '.join(problems)}. Put an "
                "intact copy there, or name another directory to begin anew."
            )
        if snapshot is not None:
            for problem in problems:
                self._notice(
                    f"Checkpoint is damaged: {problem}. Step {snapshot.step} is used instead."
                )
        return snapshot

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending; only manifests are read.

        Raises:
            CheckpointError: The directory can't be read.
        """
        steps = set()
        try:
            for found in find_complete(self._directory):
                try:
                    read_manifest(found.path, found.step)
                except (DamagedError, FileNotFoundError):
                    continue
                steps.add(found.step)
        except OSError as error:
            self._refuse(error)
        return sorted(steps)

    def close(self) -> None:
        """Let other processes write; a later ``write`` holds the directory again."""
        self._lock = None

    def _locked(self) -> WriteLock:
        lock = hold(self._directory, self._lock_timeout_s)
        if not lock.alone and lock is not self._lock:
            self._notice(
                f"The file system of {self._directory} knows no locks: make sure that no other "
                "job writes checkpoints there, and remove by hand what killed jobs leave "
                "(.writing-…, .removing-…)."
            )
        self._lock = lock
        return lock

    def _publish(self, snapshot: Snapshot, state: bytes) -> Path:
        step = snapshot.step
        final = self._directory / folder_name(step)
        draft = self._directory / new_name("writing", step)
        publishing = False
        try:
            self._write_draft(draft, snapshot, state)
            publishing = True
            if final.exists():
                final.rename(self._directory / aside_name(step))
            draft.rename(final)
            sync(self._directory)
            (final / _UNPUBLISHED).rename(final / MANIFEST)
            sync(final)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            if publishing:
                # Undo what is published in part; if that fails, the next writer or reader copes.
                with contextlib.suppress(OSError):
                    if final.is_dir() and not os.path.lexists(final / MANIFEST):
                        remove_folder(final, step)
                    settle(self._directory, step)
            raise
        return final

    def _write_draft(self, draft: Path, snapshot: Snapshot, state: bytes) -> None:
        """Write all that needs space, so that publishing can't fail for want of it."""
        draft.mkdir()
        write_file(draft / STATE, state)
        mode = (draft / STATE).stat().st_mode
        for name, arrays in ((MODEL, snapshot.model), (RANKS, snapshot.ranks)):
            write_tensors(draft / name, arrays)
            (draft / name).chmod(mode)  # the library makes files that only their owner can read
            sync(draft / name)
        # Checksums of what the files say now, not of the memory: the library wrote them.
        manifest = {name: file_facts(draft / name) for name in FILES}
        write_file(draft / _UNPUBLISHED, encode_manifest(snapshot.step, manifest))
        sync(draft)

    def _prune(self, step: int) -> None:
        """Remove what ``keep`` has no room for, but nothing that could be the last good one.

        Only those count whose files have the right sizes and which no reader of this Store found
        damaged. Later steps neither count nor go: training went back behind them, so they are
        damaged or belong to somebody else.
        """
        try:
            settle(self._directory, step)
            sound = 0
            for found in find_complete(self._directory):
                if found.step > step or found.aside:
                    continue
                if sound >= self._keep:
                    remove_folder(found.path, found.step)
                elif self._is_sound(found):
                    sound += 1
        except (OSError, CheckpointError) as error:
            text = reason(error) if isinstance(error, OSError) else str(error)
            self._notice(f"Old checkpoints in {self._directory} can't be removed: {text}.")

    def _is_sound(self, found: CheckpointFolder) -> bool:
        if found in self._damaged:
            return False
        try:
            check_sizes(found.path, read_manifest(found.path, found.step))
        except DamagedError:
            return False
        return True

    def _first_intact(self) -> tuple[Snapshot | None, list[str]]:
        """The newest intact checkpoint, and what is wrong with those that are newer."""
        give_up_s = time.monotonic() + PATIENCE_S
        for look in itertools.count(1):
            snapshot: Snapshot | None = None
            problems: dict[CheckpointFolder, str] = {}
            listed = find_complete(self._directory)
            for found in listed:
                try:
                    snapshot = _load(found)
                    break
                except DamagedError as error:
                    problems[found] = f"{found.path}: {error}"
            # What seems damaged or missing may have been replaced meanwhile.
            if all(found.is_there() for found in problems) and (
                snapshot is not None or find_complete(self._directory) == listed
            ):
                break
            if look >= _LOOKS and time.monotonic() > give_up_s:
                raise keeps_changing()
        self._damaged |= set(problems)
        return snapshot, list(problems.values())

    def _refuse(self, error: OSError) -> NoReturn:
        raise CheckpointError(
            f"Checkpoints in {self._directory} can't be read: {reason(error)}."
        ) from error


def _check(snapshot: Snapshot) -> bytes:
    """The text of the state, if the whole snapshot can be stored."""
    if type(snapshot.step) is not int or snapshot.step < 0:
        raise CheckpointError(
            f"A checkpoint's step is {snapshot.step!r}; expected an int that is not negative."
        )
    check_arrays(snapshot.model, "model")
    check_arrays(snapshot.ranks, "ranks")
    return encode_state(snapshot.state)


def _load(found: CheckpointFolder) -> Snapshot:
    """Read a checkpoint, every byte checked."""
    folder = found.path
    try:
        manifest = read_manifest(folder, found.step)
        check_contents(folder, manifest)
        size, _ = manifest[STATE]
        name = STATE
        try:
            state = decode_state(read_regular(folder / STATE, size))
            name = MODEL
            model = read_tensors(folder / MODEL)
            name = RANKS
            ranks = read_tensors(folder / RANKS)
        except ValueError as error:
            raise DamagedError(f"{name}: {error}") from None
    except FileNotFoundError as error:  # safetensors gives it no number
        raise DamagedError(str(error)) from None
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise DamagedError(error.strerror or str(error)) from None
    if not found.is_there():
        raise DamagedError("it was replaced while it was read")
    return Snapshot(step=found.step, state=state, model=model, ranks=ranks)
