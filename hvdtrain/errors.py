"""hvdtrain's exceptions.

All errors derive from ``HvdtrainError``. ``Preempted`` derives from ``SystemExit``. Messages state
the problem, the received value, and a remedy.
"""

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "DataError",
    "HvdtrainError",
    "JobError",
    "LaunchError",
    "MismatchError",
    "ModelError",
    "NonFiniteError",
    "NotInitializedError",
    "PeerFailedError",
    "PeerLostError",
    "Preempted",
    "RanksLostError",
    "TooFewRanksError",
]


class HvdtrainError(RuntimeError):
    """Base class of all errors in hvdtrain."""


class ConfigurationError(HvdtrainError, ValueError):
    """A flag, environment variable or argument is invalid."""


class NotInitializedError(HvdtrainError):
    """A function was called before ``hvdtrain.init()``."""


class LaunchError(HvdtrainError):
    """A job can't start: the launcher, MPI or devices are missing or contradict each other."""


class ModelError(HvdtrainError):
    """A model, optimizer or loss can't be distributed."""


class DataError(HvdtrainError):
    """An input can't be divided among the ranks."""


class CheckpointError(HvdtrainError):
    """A checkpoint can't be written, or none of the existing checkpoints can be read."""


class JobError(HvdtrainError):
    """A job doesn't exist, or a request for it can't be fulfilled."""


class CollectiveError(HvdtrainError):
    """A collective could not return the right result."""


class MismatchError(CollectiveError):
    """Ranks called different collectives, or the same one with different shapes, types or names."""


class NonFiniteError(CollectiveError):
    """A gradient contains NaN or infinity."""


class PeerFailedError(CollectiveError):
    """Another rank failed or left while this rank needed it."""


class PeerLostError(PeerFailedError):
    """A rank died while this rank was communicating with it.

    Args:
        message: The message.
        rank: The lost rank.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RanksLostError(PeerFailedError):
    """A lost rank had data that the other ranks need.

    All remaining ranks raise this error, and may continue after it.
    """


class TooFewRanksError(PeerFailedError):
    """Fewer than ``min_np`` ranks are left, so training ends."""


class CollectiveTimeoutError(CollectiveError):
    """Not all ranks arrived at a collective in time."""


class Preempted(SystemExit):
    """Ends the program after a preemption signal, once a checkpoint has been saved.

    The exit code is 75 (EX_TEMPFAIL in sysexits.h), because the program resumes when it is started
    again.

    Args:
        signal: The number of the signal.
    """

    EXIT_CODE = 75

    def __init__(self, signal: int) -> None:
        super().__init__(self.EXIT_CODE)
        self.signal = signal
