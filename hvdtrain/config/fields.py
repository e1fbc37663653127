"""Declarations of settings: their defaults, how they are read from text, and what they mean."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = [
    "PREFIX",
    "amount",
    "argument",
    "compression",
    "count",
    "count_or",
    "flag",
    "flag_name",
    "flag_or_auto",
    "log_level",
    "one_of",
    "part_below_one",
    "path_or_none",
    "positive_float",
    "positive_int",
    "ranks",
    "rate",
    "setting",
    "variable_name",
    "written_default",
]

PREFIX = "HVDTRAIN_"

_Value = TypeVar("_Value")


def flag_name(name: str) -> str:
    """The flag of ``hvdtrain run`` for a setting."""
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    """The environment variable that holds the setting ``name``."""
    return PREFIX + name.upper()


def written_default(entry: dataclasses.Field[Any]) -> str:
    """The default of a setting as its flag or its variable would hold it."""
    if entry.default is None or entry.metadata["written"] is not None:
        return str(entry.metadata["written"] or "none")
    if isinstance(entry.default, bool):
        return "1" if entry.default else "0"
    return f"{entry.default:g}" if isinstance(entry.default, float) else str(entry.default)


def argument(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A reader of text as argparse's ``type``, which says what was received and the ValueError."""

    def read(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"got {text!r}: {error}") from None

    return read


def _expect(fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(f"expected {expected}")


def positive_float(text: str) -> float:
    """A number above 0."""
    value = float(text)
    _expect(value > 0, "a number above 0")
    return value


def amount(text: str) -> float:
    """A number, 0 or more."""
    value = float(text)
    _expect(0 <= value < float("inf"), "a number, 0 or more")
    return value


def part_below_one(text: str) -> float:
    """A number from 0 on, below 1."""
    value = float(text)
    _expect(0 <= value < 1, "a number from 0 on, below 1")
    return value


def rate(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    _expect(0 < value < float("inf"), "a number above 0")
    return value


def positive_int(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    _expect(value > 0, "a whole number above 0")
    return value


def count(text: str) -> int:
    """A whole number, 0 or more."""
    _expect(text.isdecimal(), "a whole number, 0 or more")
    return int(text)


def count_or(word: str, least: int = 0) -> Callable[[str], int | None]:
    """Return a reader of whole numbers, ``least`` or more, that takes ``word`` for None."""

    def parse(text: str) -> int | None:
        value = int(text) if text.isdecimal() else None
        known = text == word or (value is not None and value >= least)
        _expect(known, f"a whole number, {least} or more, or {word}")
        return value

    return parse


def path_or_none(what: str) -> Callable[[str], str | None]:
    """Return a reader of paths, that takes ``none`` for None."""

    def parse(text: str) -> str | None:
        _expect(bool(text), f"a {what}, or none")
        return None if text == "none" else text

    return parse


def ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks, in their order; none for the last ones."""
    if text in ("", "last"):
        return ()
    words = [word.strip() for word in text.split(",")]
    _expect(all(word.isdecimal() for word in words), "numbers of ranks like 2,3, or last")
    ranks = sorted(map(int, words))
    _expect(len(set(ranks)) == len(ranks), "each rank once")
    return tuple(ranks)


def flag(text: str) -> bool:
    """Whether something is on: 1 or 0, true or false, yes or no, on or off."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 1 or 0")


def flag_or_auto(text: str) -> bool | None:
    """On, off, or None for auto."""
    return None if text.strip().lower() == "auto" else flag(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a reader of one of some words."""

    def parse(text: str) -> str:
        _expect(text in choices, "one of " + ", ".join(choices))
        return text

    return parse


def compression(text: str) -> str:
    """Check a form of gradients between hosts: a type, or ``powersgd:RANK``."""
    method, _, amount = text.partition(":")
    if method == "powersgd":
        fits = amount.isdecimal() and int(amount) > 0
        _expect(fits, "powersgd:RANK with a whole number above 0, like powersgd:4")
    else:
        words = ("none", "fp16", "bf16", "int8")
        _expect(text in words, f"one of {', '.join(words)}, powersgd:RANK")
    return text


def log_level(text: str) -> str:
    """A level of logging, by its own name or Horovod's."""
    word = {"trace": "debug", "fatal": "error"}.get(text.lower(), text.lower())
    return one_of("debug", "info", "warning", "error")(word)


def setting(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    *,
    written: str | None = None,
) -> Any:
    """Declare a setting as a field of a dataclass.

    Args:
        default: Its value where nothing is said.
        parse: Makes the value from text; raises ValueError.
        help: The text that --help and docs/settings.md show.
        written: The default as a user would write it, where that isn't plain.
    """
    metadata = {
        "parse": parse,
        "help": help,
        "written": written,
        "is_switch": parse in (flag, flag_or_auto),
    }
    return dataclasses.field(default=default, metadata=metadata)
