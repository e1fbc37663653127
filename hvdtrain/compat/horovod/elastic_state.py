"""Horovod's elastic training, in which the remaining ranks continue if some ranks are lost.

It works with any framework. This example trains a Keras model::

    @hvd.elastic.run
    def train(state):
        while state.batch < BATCHES:
            step()
            state.batch += 1
            if state.batch % 10 == 0:
                state.commit()

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0))

Elastic training requires an elastic job (``hvdtrain run --elastic``). In other jobs, a lost rank
ends the job. Unlike Horovod, hvdtrain does not add ranks to a running job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain import world
from hvdtrain.errors import RanksLostError

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "run",
]

HorovodInternalError = RanksLostError


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by ``commit`` on all remaining ranks if ranks were lost since the last check."""


class ObjectState:
    """Training state that consists of attributes.

    The attributes are sent to other ranks as a pickle.

    Args:
        bcast_object: Ignored.
        get_rank: Ignored.
        attributes: Attributes of the state and their initial values.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **attributes: Any,
    ) -> None:
        self._generation = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._saved = attributes
        self.restore()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Add functions that are called after ranks are lost.

        A function may scale the learning rate, for example.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call ``reset`` and the reset callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Do nothing. Subclasses may override this to react to lost ranks."""

    def commit(self) -> None:
        """Call ``save`` and ``check_host_updates``. All ranks must call this."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise an error on all ranks if a rank was lost since the last check.

        All ranks must call this.

        Raises:
            HostsUpdatedInterrupt: If ranks were lost.
            TooFewRanksError: If fewer ranks remain than ``--min-np`` requires.
        """
        too_few = world.collectives().too_few
        if too_few is not None:
            raise too_few
        if self._ranks_lost():
            raise HostsUpdatedInterrupt("ranks were lost")

    def _ranks_lost(self) -> bool:
        """Return on all ranks whether ranks were lost since the last call."""
        collectives = world.collectives()
        if not collectives.survives_losses:
            return False
        current, before = np.array(collectives.generation), self._generation
        self._generation = int(collectives.allreduce(current, "max", name="elastic state"))
        return self._generation > before

    def save(self) -> None:
        """Keep a copy of the state in memory, to which ``restore`` returns."""
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        """Restore the state from the last copy."""
        for name, value in self._saved.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Replace the state of all ranks with the state of rank 0. All ranks must call this."""
        self.save()
        self._saved = world.collectives().broadcast_object(
            self._saved, name="elastic state", codec="pickle"
        )
        ObjectState.restore(self)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function so that it is called again when ranks are lost.

    Before each call, the remaining ranks get the state of rank 0.

    Args:
        func: Function whose first argument is the state. It must continue training from that state,
            and call ``state.commit()`` regularly.
    """

    @functools.wraps(func)
    def train(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                state._ranks_lost()
                state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                pass
            except Exception as error:
                # TensorFlow raises its own errors, with the original error in their text.
                if not isinstance(error, RanksLostError) and "RanksLostError" not in str(error):
                    raise
                state.restore()
            state.on_reset()

    return train
