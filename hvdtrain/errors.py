"""Every error that hvdtrain raises, one tree.

::

    HvdtrainError
    ├── ConfigurationError        a flag, variable or argument with an unusable value
    ├── NotInitializedError       hvdtrain.init() has not been called
    ├── LaunchError               what starts the ranks, MPI or GPUs don't fit together
    ├── ModelError                a model that can't be distributed as it is
    ├── DataError                 an input that can't be shared out among ranks
    ├── CheckpointError           a checkpoint can't be written or read
    ├── JobError                  a job that isn't there, or can't be had in this way
    └── CollectiveError           something went wrong between ranks
        ├── MismatchError         ranks asked for different things at the same point
        ├── NonFiniteError        NaN or infinity in a gradient
        ├── PeerFailedError       another rank failed or left the program
        │   ├── PeerLostError     the one rank died that this rank waits for
        │   ├── RanksLostError    what only a lost rank had is gone
        │   └── TooFewRanksError  fewer ranks are left than training may go on with
        └── CollectiveTimeoutError  a rank did not arrive in time

``Preempted`` stands beside the tree: it is no error, but ends the program as ``SystemExit`` does.

Messages say what was received, what was expected, and what to do.
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
    """Base of all errors of hvdtrain."""


class ConfigurationError(HvdtrainError, ValueError):
    """A flag, an environment variable or an argument has a value that can't be used."""


class NotInitializedError(HvdtrainError):
    """A call needs ``hvdtrain.init()`` to have been called before."""


class LaunchError(HvdtrainError):
    """Launcher, MPI or devices contradict each other, or what a job needs to start is missing."""


class ModelError(HvdtrainError):
    """A model, optimizer or loss can't be distributed as it is."""


class DataError(HvdtrainError):
    """An input can't be shared out among the ranks as it is."""


class CheckpointError(HvdtrainError):
    """A checkpoint can't be written, or none of those that are there can be read."""


class JobError(HvdtrainError):
    """There is no such job, or what was asked of it can't be done."""


class CollectiveError(HvdtrainError):
    """A collective operation could not give the right result."""


class MismatchError(CollectiveError):
    """Ranks called different operations, or the same one with different shapes, types or names."""


class NonFiniteError(CollectiveError):
    """A gradient holds NaN or infinity."""


class PeerFailedError(CollectiveError):
    """Another rank failed or left while this rank needed it."""


class PeerLostError(PeerFailedError):
    """A rank died whose message this rank waits for, or that was to take one.

    Args:
        message: For the user.
        rank: Which one.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RanksLostError(PeerFailedError):
    """A rank died with what the others needed; raised on all of them, and they may go on."""


class TooFewRanksError(PeerFailedError):
    """So many ranks were lost that training must end, as ``min_np`` asks."""


class CollectiveTimeoutError(CollectiveError):
    """Not every rank arrived at a collective in time."""


class Preempted(SystemExit):
    """A signal came, a checkpoint was saved, and the program ends with exit code 75.

    75 is EX_TEMPFAIL of sysexits.h: start the program again, and it goes on.

    Args:
        signal: The number of the signal.
    """

    EXIT_CODE = 75

    def __init__(self, signal: int) -> None:
        super().__init__(self.EXIT_CODE)
        self.signal = signal
