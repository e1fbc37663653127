"""Writes checkpoints to a directory, and reads the newest checkpoint that is intact."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.files import MANIFEST, MODEL, RANKS, STATE, DamagedError
from hvdtrain.checkpoint.folders import (
    RETRY_S,
    CheckpointFolder,
    busy_directory_error,
    find_complete,
    free_name,
    hidden_name,
    remove,
    remove_remains,
)
from hvdtrain.checkpoint.lock import WriteLock, acquire
from hvdtrain.checkpoint.snapshot import (
    Snapshot,
    check_arrays,
    decode_state,
    encode_state,
    read_arrays,
    write_arrays,
)
from hvdtrain.errors import CheckpointError, ConfigurationError

__all__ = ["BackgroundWriter", "Store"]

# Number of attempts to read, even if they take longer than ``RETRY_S``, while a writer removes the
# checkpoints that are being read.
_ATTEMPTS = 5

# These errors mean that the checkpoint is damaged. After other errors, such as a missing
# permission, the checkpoint may be intact, and using an older one would lose steps.
_DAMAGE = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.EUCLEAN)


class Store:
    """A directory of checkpoints.

    Any number of processes may read, but only one may write. A process that has called ``lock`` or
    ``write`` holds the directory's lock until the process ends or all its ``Store`` objects for the
    directory are deleted.

    Args:
        directory: Path of the directory. The first ``write`` creates it and its parents.
        keep: Number of steps whose checkpoints are kept, counted from the latest saved step.
            Checkpoints of earlier steps are removed.
        notice: Function that is called with a message about each problem that doesn't prevent
            reading or writing.
        lock_timeout_s: Seconds for which ``write`` waits for another process to release the
            directory.

    Raises:
        ConfigurationError: If ``keep`` is not a positive integer.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        notice: Callable[[str], None] = lambda text: None,
        lock_timeout_s: float = 5.0,
    ) -> None:
        if type(keep) is not int or keep < 1:
            raise ConfigurationError(f"keep must be a positive integer, got {keep!r}.")
        self._directory = Path(os.path.abspath(directory))
        self._keep = keep
        self._notice = notice
        self._lock_timeout_s = lock_timeout_s
        self._lock: WriteLock | None = None
        self._damaged: set[CheckpointFolder] = set()

    def lock(self, timeout_s: float) -> None:
        """Create the directory, and keep other processes from writing there.

        Raises:
            CheckpointError: If another process still writes there after ``timeout_s``.
            OSError: If the directory can't be written to.
        """
        files.make_folders(self._directory)
        try:
            self._acquire_lock(min(timeout_s, self._lock_timeout_s))
        except CheckpointError as error:
            self._notice(f"Waiting up to {timeout_s:g} s: {error}")
            self._acquire_lock(timeout_s - self._lock_timeout_s)

    def write(self, snapshot: Snapshot) -> Path:
        """Write a snapshot, flush it to the disk and return its folder.

        Then older checkpoints are removed. The newest checkpoint of each of the last ``keep`` steps
        is kept, including the one just written.

        Raises:
            CheckpointError: If the snapshot can't be stored, the directory can't be written to, or
                another process is writing there. Earlier checkpoints stay intact.
        """
        title = f"Checkpoint of step {snapshot.step}"
        state = _check(snapshot)
        try:
            files.make_folders(self._directory)
            lock = self._acquire_lock(self._lock_timeout_s)
            with lock.mutex:
                if lock.exclusive:
                    remove_remains(self._directory)
                folder = self._publish(snapshot, state)
                self._prune(snapshot.step)
        except OSError as error:
            raise CheckpointError(
                f"{title} can't be written to {self._directory}: {files.describe_error(error)}. "
                "Earlier checkpoints are intact."
            ) from error
        except CheckpointError as error:
            raise CheckpointError(f"{title} can't be written: {error}") from None
        return folder

    def newest(self) -> Snapshot | None:
        """Return the newest intact checkpoint, or None if the directory has no checkpoints.

        Damaged checkpoints that are newer than the returned one are reported through ``notice``.

        Raises:
            CheckpointError: If all checkpoints are damaged, or the directory can't be read.
        """
        try:
            snapshot, problems = self._first_intact()
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints in {self._directory} can't be read: {files.describe_error(error)}."
            ) from error
        if snapshot is None and problems:
            raise CheckpointError(
                f"No checkpoint in {self._directory} is intact: {'; '.join(problems)}. Put an "
                "intact copy there, or choose another directory to start over."
            )
        if snapshot is not None:
            for problem in problems:
                self._notice(
                    f"Checkpoint is damaged: {problem}. Step {snapshot.step} is used instead."
                )
        return snapshot

    def _acquire_lock(self, timeout_s: float) -> WriteLock:
        lock = acquire(self._directory, timeout_s)
        if not lock.exclusive and lock is not self._lock:
            self._notice(
                f"The file system of {self._directory} doesn't support locks. Make sure that no "
                "other job writes checkpoints there. If a job was killed, remove the folders that "
                "it left behind (.writing-…, .removing-…) yourself."
            )
        self._lock = lock
        return lock

    def _publish(self, snapshot: Snapshot, state: bytes) -> Path:
        draft = self._directory / hidden_name("writing", snapshot.step)
        try:
            draft.mkdir()
            files.write_file(draft / STATE, state)
            mode = (draft / STATE).stat().st_mode
            for name, arrays in ((MODEL, snapshot.model), (RANKS, snapshot.ranks)):
                write_arrays(draft / name, arrays)
                (draft / name).chmod(mode)  # safetensors lets only the owner read the file
                files.sync(draft / name)
            # Read the files back to hash them, because safetensors has written them.
            manifest = {name: files.size_and_digest(draft / name) for name in files.FILES}
            files.write_file(draft / MANIFEST, files.encode_manifest(snapshot.step, manifest))
            files.sync(draft)
            final = self._directory / free_name(self._directory, snapshot.step)
            draft.rename(final)
            files.sync(self._directory)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return final

    def _prune(self, step: int) -> None:
        """Remove old checkpoints, so that ``keep`` steps have a checkpoint that seems intact.

        Of each of these steps, only the newest checkpoint that seems intact is kept. A checkpoint
        seems intact if its files have the right sizes and this store has not found it damaged.
        Checkpoints of steps after the latest written step are ignored and kept. This training
        resumed from an earlier step, so these checkpoints are damaged or belong to another
        training.
        """
        kept: set[int] = set()
        try:
            for folder in find_complete(self._directory):
                if folder.step > step:
                    continue
                if folder.step in kept or len(kept) == self._keep:
                    remove(folder)
                elif self._seems_intact(folder):
                    kept.add(folder.step)
        except (OSError, CheckpointError) as error:
            text = files.describe_error(error) if isinstance(error, OSError) else str(error)
            self._notice(f"Old checkpoints in {self._directory} can't be removed: {text}.")

    def _seems_intact(self, folder: CheckpointFolder) -> bool:
        if folder in self._damaged:
            return False
        try:
            files.check_sizes(folder.path, files.read_manifest(folder.path, folder.step))
        except DamagedError:
            return False
        return True

    def _first_intact(self) -> tuple[Snapshot | None, list[str]]:
        """Return the newest intact checkpoint, and the problems of all newer checkpoints."""
        deadline = time.monotonic() + RETRY_S
        for attempt in itertools.count(1):
            snapshot: Snapshot | None = None
            problems: dict[CheckpointFolder, str] = {}
            for folder in find_complete(self._directory):
                try:
                    snapshot = _load(folder)
                    break
                except DamagedError as error:
                    problems[folder] = f"{folder.path}: {error}"
            # A checkpoint may only seem damaged because a writer has removed it since.
            if not problems or problems.keys() <= set(find_complete(self._directory)):
                break
            if attempt >= _ATTEMPTS and time.monotonic() > deadline:
                raise busy_directory_error()
        self._damaged |= problems.keys()
        return snapshot, list(problems.values())


class BackgroundWriter:
    """A thread that writes one snapshot at a time while training continues.

    Args:
        store: The store to write to. The thread uses the store while ``busy`` is true.
        on_written: Called on the thread after each write, with the step of the checkpoint.
        on_busy: Called with True before each write, and with False after it.
    """

    def __init__(
        self,
        store: Store,
        on_written: Callable[[int], None],
        on_busy: Callable[[bool], None] = lambda is_busy: None,
    ) -> None:
        self._store = store
        self._on_written = on_written
        self._on_busy = on_busy
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self.written_s: list[float] = []
        """The duration of each successful write in seconds."""

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written. Its arrays must not change meanwhile."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, snapshot: Snapshot) -> None:
        """Wait until the previous snapshot is on the disk, then start writing this one."""
        self.wait()
        self._on_busy(True)
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name="hvdtrain checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the current write has finished, for at most ``timeout_s``."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def take_error(self) -> CheckpointError | None:
        """Return and clear the error of the last write. Return None if the write succeeded."""
        error, self._error = self._error, None
        return error

    def _write(self, snapshot: Snapshot) -> None:
        start = time.monotonic()
        try:
            self._store.write(snapshot)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # it would go unnoticed in this thread
            self._error = CheckpointError(f"{type(error).__name__}: {error}")
        else:
            self.written_s.append(time.monotonic() - start)
            self._on_written(snapshot.step)
        finally:
            self._on_busy(False)


def _check(snapshot: Snapshot) -> bytes:
    """Check that a snapshot can be stored, and return its encoded state."""
    if type(snapshot.step) is not int or snapshot.step < 0:
        raise CheckpointError(f"step must be a non-negative int, got {snapshot.step!r}.")
    check_arrays(snapshot.model, "model")
    check_arrays(snapshot.ranks, "ranks")
    return encode_state(snapshot.state)


def _load(folder: CheckpointFolder) -> Snapshot:
    """Read a checkpoint and verify all of its files."""
    path = folder.path
    try:
        manifest = files.read_manifest(path, folder.step)
        files.check_contents(path, manifest)
        name = STATE
        try:
            state = decode_state(files.read_regular(path / STATE, manifest[STATE][0]))
            name = MODEL
            model = read_arrays(path / MODEL)
            name = RANKS
            ranks = read_arrays(path / RANKS)
        except ValueError as error:
            raise DamagedError(f"{name}: {error}") from None
    except FileNotFoundError as error:  # safetensors doesn't set its errno
        raise DamagedError(str(error)) from None
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise DamagedError(error.strerror or str(error)) from None
    return Snapshot(step=folder.step, state=state, model=model, ranks=ranks)
