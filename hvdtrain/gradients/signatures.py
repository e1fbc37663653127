"""What the ranks must agree on before they average gradients: names, shapes, types, and None."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import MismatchError
from hvdtrain.tensorflow.variable_names import counted_anew

__all__ = ["GradientSignature", "Signature", "Signatures"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientSignature:
    """What the ranks must agree on for one gradient.

    Attributes:
        name: What errors call it: the variable's name, counted anew.
        kind: One of dense, rows (of ``tf.IndexedSlices``) and None.
        dtype: The name of its type.
        shape: Its shape as a text; that of one row where there are rows.
    """

    name: str
    kind: str
    dtype: str
    shape: str

    @classmethod
    def of(cls, name: str, gradient: Any) -> GradientSignature:
        """Describe a gradient: a tensor, ``tf.IndexedSlices`` or None."""
        if gradient is None:
            return cls(name=name, kind="None", dtype="", shape="")
        if isinstance(gradient, tf.IndexedSlices):
            shape = str(gradient.values.shape[1:])
            return cls(name=name, kind="rows", dtype=gradient.dtype.name, shape=shape)
        return cls(name=name, kind="dense", dtype=gradient.dtype.name, shape=str(gradient.shape))

    def __str__(self) -> str:
        return self.kind if self.kind == "None" else f"{self.kind} {self.dtype} {self.shape}"


class Signature(tuple[GradientSignature, ...]):
    """What the ranks must agree on for all gradients of a step."""

    @classmethod
    def of(cls, names: Sequence[str], gradients: Sequence[Any]) -> Signature:
        """Describe gradients, and give their variables names that don't differ by rank."""
        return cls(map(GradientSignature.of, counted_anew(names), gradients))

    @property
    def lacking(self) -> str:
        """Names the variables without a gradient, for the error of ranks that don't lack them."""
        names = [entry.name for entry in self if entry.kind == "None"]
        return f"None for {', '.join(names[:5])}" if names else ""

    @property
    def call_name(self) -> str:
        """What errors call the reduction of these gradients."""
        return f"gradients, {self.lacking}" if self.lacking else "gradients"

    def texts(self) -> dict[str, str]:
        """What the gradients are, by names that are told apart."""
        found: dict[str, str] = {}
        met: Counter[str] = Counter()
        for entry in self:
            met[entry.name] += 1
            number = met[entry.name]
            found[entry.name if number == 1 else f"{entry.name}#{number}"] = str(entry)
        return found


class Signatures:
    """Compares signatures between ranks, each once."""

    def __init__(self) -> None:
        self._agreed: set[Signature] = set()

    def agree(self, collectives: Collectives, signature: Signature) -> None:
        """See that all ranks come with the same gradients.

        Args:
            collectives: The engine of the ranks.
            signature: What this rank comes with.

        Raises:
            MismatchError: Another rank comes with something else.
        """
        if signature in self._agreed:
            return
        # With run_eagerly a rank may come here at a later step, when the others do not.
        everyone = collectives.allgather_object(
            signature.texts(), name="gradient signatures", note=signature.lacking
        )
        for rank, theirs in enumerate(everyone):
            if list(theirs.items()) != list(everyone[0].items()):
                raise MismatchError(_explain(everyone[0], rank, theirs))
        self._agreed.add(signature)


def _explain(first: dict[str, str], rank: int, theirs: dict[str, str]) -> str:
    differences = [
        f"{name} is {first.get(name, 'absent')} on rank 0 and {theirs.get(name, 'absent')} on "
        f"rank {rank}"
        for name in {**first, **theirs}
        if first.get(name) != theirs.get(name)
    ]
    shown = "; ".join(differences[:5]) or "they come in another order"
    return (
        f"The gradients of rank 0 and rank {rank} differ: {shown}. All ranks must train the same "
        "variables with the same loss."
    )
