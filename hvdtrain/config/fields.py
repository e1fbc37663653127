"""Fields of settings: names of flags and variables, parsers, and defaults."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = [
    "PREFIX",
    "argument",
    "compression",
    "count",
    "count_or",
    "flag",
    "flag_name",
    "flag_or_auto",
    "fraction",
    "log_level",
    "non_negative_float",
    "one_of",
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
_Number = TypeVar("_Number", int, float)


def flag_name(name: str) -> str:
    """Return the flag of ``hvdtrain run`` for a setting."""
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    """Return the environment variable for a setting."""
    return PREFIX + name.upper()


def written_default(entry: dataclasses.Field[Any]) -> str:
    """Return the default of a setting as it is written for its flag or variable."""
    if entry.default is None or entry.metadata["written"] is not None:
        return str(entry.metadata["written"] or "none")
    if isinstance(entry.default, bool):
        return "1" if entry.default else "0"
    return f"{entry.default:g}" if isinstance(entry.default, float) else str(entry.default)


def argument(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Turn a parser that raises ``ValueError`` into an argparse ``type`` with a clear message."""

    def parse_argument(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"got {text!r}: {error}") from None

    return parse_argument


def _expect(is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ValueError(f"expected {expected}")


def _number(
    kind: Callable[[str], _Number], text: str, is_valid: Callable[[_Number], bool], expected: str
) -> _Number:
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"expected {expected}") from None
    _expect(is_valid(value), expected)
    return value


def positive_float(text: str) -> float:
    """Parse a number above 0, which may be infinite."""
    return _number(float, text, lambda value: value > 0, "a number above 0")


def non_negative_float(text: str) -> float:
    """Parse a finite number, 0 or more."""
    return _number(float, text, lambda value: 0 <= value < math.inf, "a number, 0 or more")


def fraction(text: str) -> float:
    """Parse a number from 0 to below 1."""
    return _number(float, text, lambda value: 0 <= value < 1, "a number from 0 to below 1")


def rate(text: str) -> float:
    """Parse a finite number above 0."""
    return _number(float, text, lambda value: 0 < value < math.inf, "a finite number above 0")


def positive_int(text: str) -> int:
    """Parse a whole number above 0."""
    return _number(int, text, lambda value: value > 0, "a whole number above 0")


def count(text: str) -> int:
    """Parse a whole number, 0 or more."""
    return _number(int, text, lambda value: value >= 0, "a whole number, 0 or more")


def count_or(keyword: str, minimum: int = 0) -> Callable[[str], int | None]:
    """Return a parser for a whole number from ``minimum``, or for ``keyword``, which gives None."""

    def parse(text: str) -> int | None:
        if text == keyword:
            return None
        is_valid = text.isdecimal() and int(text) >= minimum
        _expect(is_valid, f"a whole number, {minimum} or more, or {keyword}")
        return int(text)

    return parse


def path_or_none(noun: str) -> Callable[[str], str | None]:
    """Return a parser that accepts a path, or ``none``, which becomes None."""

    def parse(text: str) -> str | None:
        _expect(bool(text), f"a {noun}, or none")
        return None if text == "none" else text

    return parse


def ranks(text: str) -> tuple[int, ...]:
    """Parse a list of ranks: ``2,3`` becomes ``(2, 3)``, and ``last`` becomes an empty tuple."""
    if text in ("", "last"):
        return ()
    entries = [entry.strip() for entry in text.split(",")]
    _expect(all(entry.isdecimal() for entry in entries), "ranks such as 2,3, or last")
    ranks = sorted(map(int, entries))
    _expect(len(set(ranks)) == len(ranks), "each rank once")
    return tuple(ranks)


def flag(text: str) -> bool:
    """Parse 1 or 0, true or false, yes or no, on or off."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 1 or 0")


def flag_or_auto(text: str) -> bool | None:
    """Parse a flag, or ``auto``, which becomes None."""
    return None if text.strip().lower() == "auto" else flag(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser for one of several keywords."""

    def parse(text: str) -> str:
        _expect(text in choices, "one of " + ", ".join(choices))
        return text

    return parse


def compression(text: str) -> str:
    """Parse a gradient format: a keyword or ``powersgd:RANK``."""
    method, _, rank = text.partition(":")
    if method == "powersgd":
        is_valid = rank.isdecimal() and int(rank) > 0
        _expect(is_valid, "powersgd:RANK with a whole number above 0, such as powersgd:4")
    else:
        keywords = ("none", "fp16", "bf16", "int8")
        _expect(text in keywords, f"one of {', '.join(keywords)}, powersgd:RANK")
    return text


def log_level(text: str) -> str:
    """Parse a log level. Horovod's names, such as ``fatal``, are accepted too."""
    level = {"trace": "debug", "fatal": "error"}.get(text.lower(), text.lower())
    return one_of("debug", "info", "warning", "error")(level)


def setting(
    default: Any, parse: Callable[[str], Any], help: str, *, written: str | None = None
) -> Any:
    """Declare a setting as a field of a dataclass.

    Args:
        default: The value if neither flag nor variable is given.
        parse: Parses the text of the setting. Raises ``ValueError`` if the text is invalid.
        help: The description in --help and docs/settings.md.
        written: The default as text, if it differs from ``str(default)``.
    """
    metadata = {
        "parse": parse,
        "help": help,
        "written": written,
        "is_switch": parse in (flag, flag_or_auto),
    }
    return dataclasses.field(default=default, metadata=metadata)
