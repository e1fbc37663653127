"""The question that ``hvdtrain check`` asks a host, and the facts in the answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MARK", "Facts", "Question", "read_facts", "read_question"]

# Begins the line that holds the answer; profiles of login shells print things, too.
MARK = "hvdtrain-check "


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to a host: what it has to know to answer.

    Attributes:
        names: The names of all hosts, to be resolved.
        folder: The launcher's current folder.
        token_file: A file that the launcher wrote there; empty where it could not.
        token: Its content.
        addresses: Addresses of the launcher, as its routes to this host say.
        port: Where the launcher listens; 0 for nowhere.
    """

    names: tuple[str, ...] = ()
    folder: str = ""
    token_file: str = ""
    token: str = ""
    addresses: tuple[str, ...] = ()
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that a host tells of itself; None and empty where it could not find out.

    Attributes:
        machine: The same for two names of one host, and different for two hosts.
        started_s: The host's clock when it began to answer.
        ended_s: The host's clock when it had its answer.
        versions: Versions of the packages by name; a package that is not installed is absent.
        mpi: The MPI library that mpi4py loads, in its own words.
        mpi_error: Why it loads none.
        folder: ``same``, ``other`` (one without the launcher's file) or ``absent``.
        gpus: Model and driver of each.
        gpu_error: Why nvidia-smi, which is there, named none.
        memlock_bytes: Memory that a process may lock; -1 for any number.
        infiniband: Its InfiniBand devices.
        shm_bytes: Size of /dev/shm.
        shm_free_bytes: Space that is free in /dev/shm.
        names: Addresses of each host's name; none where it can't be resolved.
        back: Address at which the launcher was reached over TCP.
        back_error: Why it was not.
        local_address: This host's end of that way.
        interface: The network interface of that end.
        speed_mbit: The interface's speed, where it is known.
        errors: The error that kept each part of the probe from finding out.
    """

    hostname: str = ""
    machine: str = ""
    started_s: float = 0.0
    ended_s: float = 0.0
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    mpi: str = ""
    mpi_error: str = ""
    folder: str = ""
    gpus: Sequence[Sequence[str]] = ()
    gpu_error: str = ""
    memlock_bytes: int | None = None
    infiniband: Sequence[str] = ()
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    back: str = ""
    back_error: str = ""
    local_address: str = ""
    interface: str = ""
    speed_mbit: int | None = None
    cores: int | None = None
    load: float | None = None
    errors: Mapping[str, str] = field(default_factory=dict)


def read_question(text: str) -> Question:
    """The question in a probe's argument, less what only another version of hvdtrain knows."""
    known = {entry.name for entry in dataclasses.fields(Question)}
    asked: dict[str, Any] = json.loads(text)
    return Question(**{name: value for name, value in asked.items() if name in known})


def read_facts(output: str) -> Facts | None:
    """The facts in what a probe printed; None where there are none."""
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            try:
                found: dict[str, Any] = json.loads(text)
            except ValueError:
                continue
            # Another version of hvdtrain may say more, or less.
            known = {entry.name for entry in dataclasses.fields(Facts)}
            return Facts(**{name: value for name, value in found.items() if name in known})
    return None
