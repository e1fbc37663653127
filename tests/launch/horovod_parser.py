"""Prints the flags of the installed horovodrun as JSON. Run it with Horovod's Python."""

from __future__ import annotations

import argparse
import json
from typing import NoReturn


def show(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
    # Without nargs, a flag takes one value.
    counts = {None: 1}
    flags = {
        name: counts.get(action.nargs, action.nargs)
        for action in parser._actions
        for name in action.option_strings
    }
    print(json.dumps(flags))
    raise SystemExit


if __name__ == "__main__":
    # horovodrun creates and uses its parser in one function.
    argparse.ArgumentParser.parse_args = show  # type: ignore[assignment, method-assign]
    from horovod.runner import launch

    launch.parse_args()
