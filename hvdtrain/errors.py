"""Every error that hvdtrain raises, one tree.

::

    HvdtrainError
    ├── ConfigurationError        a flag, variable or argument with an unusable value
    ├── NotInitializedError       hvdtrain.init() has not been called
    ├── LaunchError               the launcher, MPI or the GPUs contradict each other
    ├── ModelError                a model that can't be distributed as it is
    ├── DataError                 an input that can't be shared out among ranks
    └── CollectiveError           something went wrong between ranks
        ├── MismatchError         ranks asked for different things at the same point
        ├── NonFiniteError        NaN or infinity in a gradient
        ├── PeerFailedError       another rank failed or left the program
        └── CollectiveTimeoutError  a rank did not arrive in time

Messages say what was received, what was expected, and what to do.
"""

__all__ = [
    "CollectiveError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "DataError",
    "HvdtrainError",
    "LaunchError",
    "MismatchError",
    "ModelError",
    "NonFiniteError",
    "NotInitializedError",
    "PeerFailedError",
]


class HvdtrainError(RuntimeError):
    """Base of all errors of hvdtrain."""


class ConfigurationError(HvdtrainError, ValueError):
    """A flag, an environment variable or an argument has a value that can't be used."""


class NotInitializedError(HvdtrainError):
    """A call needs ``hvdtrain.init()`` to have been called before."""


class LaunchError(HvdtrainError):
    """What the launcher, MPI and the devices say about this process can't all be true."""


class ModelError(HvdtrainError):
    """A model, optimizer or loss can't be distributed as it is."""


class DataError(HvdtrainError):
    """An input can't be shared out among the ranks as it is."""


class CollectiveError(HvdtrainError):
    """A collective operation could not give the right result."""


class MismatchError(CollectiveError):
    """Ranks called different operations, or the same one with different shapes, types or names."""


class NonFiniteError(CollectiveError):
    """A gradient holds NaN or infinity."""


class PeerFailedError(CollectiveError):
    """Another rank failed or left while this rank needed it."""


class CollectiveTimeoutError(CollectiveError):
    """Not every rank arrived at a collective in time."""
