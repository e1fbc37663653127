"""``init`` as Horovod has it: with process sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain import world
from hvdtrain.errors import ConfigurationError
from hvdtrain.horovod.process_sets import ProcessSet, add_process_set

__all__ = ["init"]


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """As ``hvdtrain.init()``, and make process sets usable. Further calls do nothing.

    Args:
        comm: None: a job has all ranks that its launcher started. A process set holds some.
        process_sets: Of the job; the same on every rank. "dynamic" asks for what is always so:
            more can be added later.

    Raises:
        ConfigurationError: Some of the ranks were asked for, or what is no process set.
    """
    if comm is not None:
        raise ConfigurationError(
            f"Received comm={comm!r}; expected None: the job has all ranks that were started. Make "
            "a ProcessSet of those that are to work together, and pass it to init or "
            "add_process_set."
        )
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ConfigurationError(
                f"Received process_sets={process_sets!r}; expected a list of ProcessSet, or "
                '"dynamic".'
            )
        process_sets = None
    if world.is_initialized():
        return
    world.init()
    for process_set in process_sets or ():
        add_process_set(process_set)
