"""The ranks whose gradients went into each step."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Contributions"]


class Contributions:
    """The ranks that had a part in each step.

    Filled while steps run, perhaps several in one go; read when Python has its turn again.

    Members are ranks by their first numbers; see ``hvdtrain.collectives.interface.Collectives``.
    """

    def __init__(self) -> None:
        self._steps: list[frozenset[int] | None] = []

    def begin_step(self) -> None:
        """Begin another step, to which what is added from now on belongs."""
        self._steps.append(None)

    def add(self, members: Iterable[int]) -> None:
        """Note that some gradients of the step in work were averaged over these members."""
        if self._steps:
            before = self._steps[-1]
            self._steps[-1] = frozenset(members) if before is None else before & set(members)

    def take(self) -> list[frozenset[int] | None]:
        """Return, for each step since the last call, who had a part in all of its gradients.

        None for a step that averaged none, as before the last of several that are accumulated.
        """
        steps, self._steps = self._steps, []
        return steps
