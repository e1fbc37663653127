"""Ways to send less than all of a gradient, chosen by name."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.gradients.compressors.interface import GradientCompressor
from hvdtrain.gradients.compressors.low_rank import LowRank
from hvdtrain.gradients.compressors.top_k import TopK

__all__ = ["GradientCompressor", "choose_compressor", "choose_wire"]


def choose_compressor(
    compression: str, hosts: Sequence[int], *, elastic: bool = False
) -> GradientCompressor | None:
    """Return the compressor that ``--compression`` asks for, where a part of gradients is left out.

    Args:
        compression: As the settings have it: ``powersgd:RANK``, ``topk:SHARE``, or another.
        hosts: The host of each rank; between the ranks of one all is sent.
        elastic: Whether ranks may be lost.

    Returns:
        None for other forms, and where there is one host.
    """
    if len(set(hosts)) == 1:
        return None
    method, _, amount = compression.partition(":")
    if method == "powersgd":
        return LowRank(int(amount))
    if method == "topk":
        # What several have added up may not be with one of them that is lost.
        return TopK(float(amount), range(len(hosts)) if elastic else hosts)
    return None


def choose_wire(compression: str) -> str:
    """The form in which each value crosses between hosts, of ``wire_format``."""
    return "none" if ":" in compression else compression
