"""Training that goes on without ranks that die, under Horovod's names.

::

    @hvd.elastic.run
    def train(state):
        while state.batch < BATCHES:
            step()
            state.batch += 1
            if state.batch % 10 == 0:
                state.commit()

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0))

The job has to be elastic (``hvdtrain run --elastic``), or a rank that dies ends it. Ranks are lost
and never come back, so nobody has to be brought up to date but after an operation that could not
be finished.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import RanksLostError
from hvdtrain.horovod.broadcast import broadcast_object, broadcast_variables

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]

# What Horovod calls an operation that could not be finished, after which ranks may go on.
HorovodInternalError = RanksLostError


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks were lost; raised by ``State.commit`` on all that are left.

    Args:
        skip_sync: Whether all that are left have the same state.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("ranks were lost")
        self.skip_sync = skip_sync


class State:
    """Holds what ranks that go on must have alike."""

    def __init__(self) -> None:
        self._generation = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Have functions called after ranks were lost; to scale the learning rate anew, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls ``reset`` and the functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Call ``save``, then ``check_host_updates``; collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Interrupt ``run``'s function on all ranks if any was lost; collective.

        Raises:
            HostsUpdatedInterrupt: Since the last time some were.
            TooFewRanksError: Fewer are left than ``--min-np`` asks for.
        """
        too_few = world.collectives().too_few
        if too_few is not None:
            raise too_few
        if self.learn_losses():
            raise HostsUpdatedInterrupt(skip_sync=False)

    def learn_losses(self) -> bool:
        """Whether ranks were lost since the last time; the same on all ranks, collective."""
        collectives = world.collectives()
        if not collectives.survives_losses:
            return False
        mine, before = np.array(collectives.generation), self._generation
        self._generation = int(collectives.allreduce(mine, "max", name="elastic state"))
        return self._generation > before

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0; collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do what is due after ranks were lost; nothing here, for classes of yours to override."""


class ObjectState(State):
    """Attributes of a state; they travel by pickle.

    Args:
        bcast_object: Has no effect; Horovod's classes pass it.
        get_rank: Has no effect; Horovod's classes pass it.
        attributes: By name; ``state.name`` is their value from then on.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__()
        self._saved = attributes
        self.restore()

    def save(self) -> None:
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, value)

    def sync(self) -> None:
        self.save()
        self._saved = broadcast_object(self._saved, name="elastic state")
        ObjectState.restore(self)


class TensorFlowState(ObjectState):
    """Holds variables, and attributes as ``ObjectState`` does.

    Args:
        variables: The variables; the same on all ranks.
        session: None: there are no sessions in TensorFlow 2.
        attributes: By name; see ``ObjectState``.

    Raises:
        ValueError: No variables are given: TensorFlow 2 keeps no list of all.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: None = None, **attributes: Any
    ) -> None:
        if variables is None:
            raise ValueError(
                "TensorFlowState received no variables, and TensorFlow 2 keeps no list of all: "
                "pass those of the model and of the optimizer."
            )
        self.variables = list(variables)
        self._values: list[np.ndarray] = []
        super().__init__(**attributes)
        self.save()

    def save(self) -> None:
        self._values = [np.array(variable.numpy()) for variable in self.variables]
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables, self._values):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self.variables, root_rank=0)
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """A Keras model with its optimizer, and attributes.

    Args:
        model: Built.
        optimizer: The one that it is compiled with if not given.
        backend: Has no effect.
        attributes: By name; see ``ObjectState``.

    Raises:
        ValueError: The model is not built.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: None = None, **attributes: Any
    ) -> None:
        if not model.built:
            raise ValueError(
                f"The model {model.name!r} is not built, so there are no weights to keep. Call "
                "model.build(input_shape) first."
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else model.optimizer
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__([*model.variables, *self.optimizer.variables], **attributes)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function again whenever ranks were lost, until it returns.

    Before each call the ranks that are left take the state of rank 0.

    Args:
        func: Takes a ``State``, and what else it is called with. It trains, goes on from where
            the state says, and calls ``state.commit()`` now and then.
    """

    @functools.wraps(func)
    def train(state: State, *args: Any, **more: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.learn_losses()
                    state.sync()
                return func(state, *args, **more)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except (RanksLostError, tf.errors.UnknownError) as error:
                # In a graph TensorFlow turns the loss of ranks into an error of its own.
                lost = isinstance(error, RanksLostError) or RanksLostError.__name__ in str(error)
                if not lost:
                    raise
                state.restore()
                skip_sync = False
            state.on_reset()

    return train
