"""The error of ranks that make different calls: what each called, and where that differs."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["explain"]


def explain(texts: Sequence[str], numbers: Sequence[int]) -> str:
    """The text of the error that says which rank called what.

    Args:
        texts: What each rank called.
        numbers: What errors call these ranks.
    """
    ranks_of: dict[str, list[str]] = {}
    for number, text in zip(numbers, texts):
        ranks_of.setdefault(text, []).append(str(number))
    letters = enumerate(zip(*ranks_of))
    difference = next((place for place, several in letters if len(set(several)) > 1), 0)
    calls = "; ".join(
        f"rank {', '.join(ranks)}: {_shorten(text, difference)}" for text, ranks in ranks_of.items()
    )
    return (
        f"Ranks made different calls at the same point. {calls}. Every rank must make the same "
        "calls with the same names, shapes and types in the same order."
    )


def _shorten(text: str, difference: int, limit: int = 300) -> str:
    """The beginning, and where it differs from another text if that is further on."""
    if len(text) <= limit:
        return text
    if difference < limit - 50:
        return f"{text[:limit]} …"
    return f"{text[:150]} … {text[difference - 50 : difference + 100]} …"
