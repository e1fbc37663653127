"""Writes checkpoints into a directory, and finds the newest one that is intact."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hvdtrain.checkpoint.files import (
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
    make_folders,
    read_manifest,
    read_regular,
    reason,
    sync,
    write_file,
)
from hvdtrain.checkpoint.folders import (
    PATIENCE_S,
    CheckpointFolder,
    find_complete,
    free_name,
    hidden_name,
    keeps_changing,
    remove,
    sweep,
)
from hvdtrain.checkpoint.lock import WriteLock, hold
from hvdtrain.checkpoint.snapshot import Snapshot, decode_state, encode_state
from hvdtrain.checkpoint.tensors import check_arrays, read_tensors, write_tensors
from hvdtrain.errors import CheckpointError, ConfigurationError

__all__ = ["BackgroundWriter", "Store"]

# How often a reader looks again at least, however long it takes to read a checkpoint.
_LOOKS = 5

# Reading failed with these: what is on the disk isn't a checkpoint any more. With others, such as
# a lack of permission, it may be intact, and falling back to an older one would lose steps.
_DAMAGE = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.EUCLEAN)


class Store:
    """A directory of checkpoints.

    Everyone may read; the process that has written holds the directory until its last Store of the
    directory is gone, or until it ends, however it ends.

    Args:
        directory: Made, with those above it, when the first checkpoint is written.
        keep: How many steps to keep a checkpoint of.
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

        Afterwards the newest checkpoint of each of the newest ``keep`` steps up to this one is
        left.

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
                if lock.alone:
                    sweep(self._directory)
                folder = self._publish(snapshot, state)
                self._prune(snapshot.step)
        except OSError as error:
            raise CheckpointError(
                f"{what} can't be written to {self._directory}: {reason(error)}. Checkpoints "
                "that were there are intact."
            ) from error
        except CheckpointError as error:
            raise CheckpointError(f"{what} can't be written: {error}") from None
        return folder

    def newest(self) -> Snapshot | None:
        """Return the newest checkpoint that is intact; None if there has been none.

        Damaged ones are reported through ``notice``.

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
                "intact copy there, or name another directory to start over."
            )
        if snapshot is not None:
            for problem in problems:
                self._notice(
                    f"Checkpoint is damaged: {problem}. Step {snapshot.step} is used instead."
                )
        return snapshot

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending; only manifests are read.

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
        draft = self._directory / hidden_name("writing", snapshot.step)
        try:
            draft.mkdir()
            write_file(draft / STATE, state)
            mode = (draft / STATE).stat().st_mode
            for name, arrays in ((MODEL, snapshot.model), (RANKS, snapshot.ranks)):
                write_tensors(draft / name, arrays)
                (draft / name).chmod(mode)  # the library makes files that only their owner can read
                sync(draft / name)
            # Checksums of the files, not of the memory: the library wrote them.
            manifest = {name: file_facts(draft / name) for name in FILES}
            write_file(draft / MANIFEST, encode_manifest(snapshot.step, manifest))
            sync(draft)
            final = self._directory / free_name(self._directory, snapshot.step)
            draft.rename(final)
            sync(self._directory)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return final

    def _prune(self, step: int) -> None:
        """Remove checkpoints beyond ``keep``, but none that could be the last good one.

        Only those count whose files have the right sizes and which no reader of this Store found
        damaged; of each step the newest. Later steps neither count nor go: training resumed from
        before them, so they are damaged or belong to another training.
        """
        kept: set[int] = set()
        try:
            for found in find_complete(self._directory):
                if found.step > step:
                    continue
                if found.step in kept or len(kept) == self._keep:
                    remove(found)
                elif self._is_sound(found):
                    kept.add(found.step)
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
        """Return the newest intact checkpoint, and the problems of newer ones."""
        give_up_s = time.monotonic() + PATIENCE_S
        for look in itertools.count(1):
            snapshot: Snapshot | None = None
            problems: dict[CheckpointFolder, str] = {}
            for found in find_complete(self._directory):
                try:
                    snapshot = _load(found)
                    break
                except DamagedError as error:
                    problems[found] = f"{found.path}: {error}"
            # A folder that seems damaged may have been removed meanwhile, as newer ones came.
            if not problems or problems.keys() <= set(find_complete(self._directory)):
                break
            if look >= _LOOKS and time.monotonic() > give_up_s:
                raise keeps_changing()
        self._damaged |= problems.keys()
        return snapshot, list(problems.values())

    def _refuse(self, error: OSError) -> NoReturn:
        raise CheckpointError(
            f"Checkpoints in {self._directory} can't be read: {reason(error)}."
        ) from error


class BackgroundWriter:
    """Writes one snapshot at a time on a thread, while training continues.

    Args:
        store: Where they go; used by the writing thread while ``busy``.
        report: Called on that thread with the step of each checkpoint that is safely on disk.
    """

    def __init__(self, store: Store, report: Callable[[int], None]) -> None:
        self._store = store
        self._report = report
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self.written_s: list[float] = []
        """The seconds that each successful write took."""

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written; its arrays must stay as they are."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, snapshot: Snapshot) -> None:
        """Start to write ``snapshot``, after the one before is on disk."""
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name="hvdtrain checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written, or the time is over."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def take_error(self) -> CheckpointError | None:
        """Return why the latest snapshot could not be written, once; None if it could."""
        error, self._error = self._error, None
        return error

    def _write(self, snapshot: Snapshot) -> None:
        start = time.monotonic()
        try:
            self._store.write(snapshot)
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            # Nobody would see an exception of this thread.
            self._error = CheckpointError(f"{type(error).__name__}: {error}")
        else:
            self.written_s.append(time.monotonic() - start)
            self._report(snapshot.step)


def _check(snapshot: Snapshot) -> bytes:
    """Return the text of the state, if the whole snapshot can be stored."""
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
    return Snapshot(step=found.step, state=state, model=model, ranks=ranks)
