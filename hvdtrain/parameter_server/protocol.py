"""What workers and parameter servers say to each other.

A worker sends a request to every server, with what belongs to it, and each server answers when it
may go on. All are a few numbers of fixed size; weights, gradients and optimizer states follow as
flat buffers, whose layout both sides know from the shards.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import numpy as np

from hvdtrain.errors import CollectiveError, MismatchError, NonFiniteError

__all__ = [
    "DATA",
    "NO_STAND",
    "REFUSALS",
    "REPLY",
    "REPLY_DATA",
    "REQUEST",
    "STAND_NUMBERS",
    "Kind",
    "Reply",
    "Request",
]

# Tags.
REQUEST = 1
DATA = 2
REPLY = 3
REPLY_DATA = 4

# What a request may be refused with.
REFUSALS: tuple[type[CollectiveError], ...] = (MismatchError, NonFiniteError)

# Small enough to arrive without anybody waiting for it.
REFUSAL_BYTES = 800

STAND_NUMBERS = 9
NO_STAND = (-1,) * STAND_NUMBERS

REQUEST_FORMAT = f"<qqq?dd?q{STAND_NUMBERS}q"
REPLY_FORMAT = f"<qq?qqdbh{REFUSAL_BYTES}s"


class Kind(enum.IntEnum):
    """What a worker wants.

    The first request of a job is the chief's LOAD; servers let all others wait for it.
    """

    LOAD = 1  # the chief gives weights and the optimizer's state
    PULL = 2  # the weights
    PUSH = 3  # a gradient, for which the weights come back
    DONE = 4  # nothing more; answered when all are done, the chief with the optimizer's state, too
    LOOK = 5  # how things are; answered at once, without weights
    LEAVE = 6  # no gradient any more, but DONE comes later; answered as LOOK
    FREEZE = 7  # the chief wants a snapshot; answered with how far the server is
    SNAPSHOT = 8  # the chief says how far to go; weights, state and stands of that moment
    STATE = 9  # the chief wants weights and state as they are; answered at once


class Request(NamedTuple):
    """A worker's words.

    Attributes:
        kind: What it wants.
        step: Of a gradient: the number that the server gave with the weights.
        version: Of the weights that a gradient was computed with.
        counts: Whether a gradient follows; there may be none in a step.
        weight: What it counts for beside those of other workers.
        learning_rate: The chief's, where it has one to tell; NaN otherwise.
        stop: Whether a worker that is done wants the others to end as well.
        signal: One that came to this worker; the chief's is the one by which it ends all. 0 for
            none.
        stand: Where the worker is in its data when this gradient is applied; numbers that servers
            keep for a snapshot. ``NO_STAND`` leaves the last ones.
    """

    kind: Kind
    step: int = 0
    version: int = 0
    counts: bool = False
    weight: float = 0.0
    learning_rate: float = float("nan")
    stop: bool = False
    signal: int = 0
    stand: tuple[int, ...] = NO_STAND

    def pack(self) -> np.ndarray:
        """As bytes."""
        return _pack(REQUEST_FORMAT, (*self[:-1], *self.stand))

    @classmethod
    def unpack(cls, data: np.ndarray) -> Request:
        """From ``pack``'s bytes."""
        kind, *others = struct.unpack(REQUEST_FORMAT, data.tobytes())
        single, stand = others[:-STAND_NUMBERS], others[-STAND_NUMBERS:]
        return cls(*(Kind(kind), *single, tuple(stand)))

    @classmethod
    def buffer(cls) -> np.ndarray:
        """Where one fits."""
        return np.empty(struct.calcsize(REQUEST_FORMAT), np.uint8)


class Reply(NamedTuple):
    """A server's answer; the weights come after it.

    Attributes:
        step: Number of the next step of this worker.
        version: How many updates went into the weights.
        stop: Whether training is to end.
        refusal: What was wrong with the request; empty where nothing was. Otherwise the weights
            are not to be used.
        signal: To the chief, one that came to some rank; to the others, the one by which the chief
            has ended the training. 0 for none.
        training: How many workers may still send gradients.
        learning_rate: Of the next update; NaN where workers don't need it.
        error: Which of ``REFUSALS`` a refusal is.
    """

    step: int
    version: int
    stop: bool = False
    refusal: str = ""
    signal: int = 0
    training: int = 0
    learning_rate: float = float("nan")
    error: int = 0

    def pack(self) -> np.ndarray:
        """As bytes."""
        text = self.refusal.encode()[:REFUSAL_BYTES]
        numbers = (self.step, self.version, self.stop, self.signal, self.training)
        more = (self.learning_rate, self.error)
        return _pack(REPLY_FORMAT, (*numbers, *more, len(text), text))

    @classmethod
    def unpack(cls, data: np.ndarray) -> Reply:
        """From ``pack``'s bytes."""
        *numbers, signal, training, rate, error, length, text = struct.unpack(
            REPLY_FORMAT, data.tobytes()
        )
        # A text that was too long may end within a character.
        refusal = text[:length].decode(errors="replace")
        return cls(*(*numbers, refusal, signal, training, rate, error))

    @classmethod
    def buffer(cls) -> np.ndarray:
        """Where one fits."""
        return np.empty(struct.calcsize(REPLY_FORMAT), np.uint8)


def _pack(form: str, values: tuple[object, ...]) -> np.ndarray:
    return np.frombuffer(struct.pack(form, *values), np.uint8)
