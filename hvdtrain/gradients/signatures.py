"""The agreement of ranks before they average gradients: on names, shapes, types, and None."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import MismatchError
from hvdtrain.tensorflow.variable_names import renumbered

__all__ = ["Signature", "Signatures"]

_NONE = "None"


@dataclasses.dataclass(frozen=True)
class Signature:
    """The description of all gradients of a step that the ranks must agree on.

    Attributes:
        names: What errors call their variables, counted anew: names that don't differ by rank.
        kinds: What each gradient is, with type and shape: dense, rows of ``tf.IndexedSlices`` (of
            which the shape of one counts), or None.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str], gradients: Sequence[Any]) -> Signature:
        """Describe gradients: tensors, ``tf.IndexedSlices`` or None."""
        return cls(tuple(renumbered(names)), tuple(map(_kind_of, gradients)))

    @property
    def lacking(self) -> str:
        """Names the variables without a gradient, for the error of ranks that don't lack them."""
        names = [name for name, kind in zip(self.names, self.kinds) if kind == _NONE]
        return f"None for {', '.join(names[:5])}" if names else ""

    def call_name(self, what: str) -> str:
        """Return what errors call the reduction of these gradients, or whatever ``what`` is."""
        return f"{what}s, {self.lacking}" if self.lacking else f"{what}s"

    def texts(self) -> dict[str, str]:
        """Return the kinds of the gradients, by names that are told apart."""
        found: dict[str, str] = {}
        met: Counter[str] = Counter()
        for name, kind in zip(self.names, self.kinds):
            met[name] += 1
            found[name if met[name] == 1 else f"{name}#{met[name]}"] = kind
        return found


class Signatures:
    """Compares signatures between ranks, each once."""

    def __init__(self) -> None:
        self._agreed: set[Signature] = set()

    def agree(self, collectives: Engine, signature: Signature) -> None:
        """Check that all ranks come with the same gradients; collective, once for each signature.

        Raises:
            MismatchError: Another rank comes with something else.
        """
        if signature in self._agreed:
            return
        texts = signature.texts()
        # A thousand ranks with hundreds of variables each have megabytes to say, and few bytes do.
        digest = hashlib.sha256(repr(list(texts.items())).encode()).hexdigest()
        # With run_eagerly a rank may come here at a later step, when the others do not.
        digests = collectives.allgather_object(
            digest, name="gradient signatures", note=signature.lacking
        )
        if len(set(digests)) > 1:
            everyone = collectives.allgather_object(texts, name="gradients that differ")
            rank = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
            raise MismatchError(_explain(everyone[0], rank, everyone[rank]))
        self._agreed.add(signature)


def _kind_of(gradient: Any) -> str:
    if gradient is None:
        return _NONE
    if isinstance(gradient, tf.IndexedSlices):
        return f"rows {gradient.dtype.name} {gradient.values.shape[1:]}"
    return f"dense {gradient.dtype.name} {gradient.shape}"


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
