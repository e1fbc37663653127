"""Sample answers of hosts to hvdtrain check, and the problems in them."""

from __future__ import annotations

import dataclasses
from typing import Any

from hvdtrain.check.host_checks import find_problems
from hvdtrain.cluster.gpus import GpuState
from hvdtrain.remote.host_probe import HostFacts
from hvdtrain.remote.problem import Problem
from hvdtrain.remote.remote_probe import Answer, Failure, FailureKind, Method

__all__ = ["GPU", "PYTHON", "VERSIONS", "answer", "facts", "lost", "problems", "the_problem"]

PYTHON = "/venv/bin/python"
VERSIONS = {"hvdtrain": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1", "mpi4py": "4.1.2"}
GPU = GpuState(number="0", id="GPU-0", model="NVIDIA H200", driver="570.86", memory_bytes=141 << 30)


def facts(name: str, **changes: Any) -> HostFacts:
    default = HostFacts(
        machine=f"{name} boot",
        started_s=100.5,
        ended_s=101.0,
        python="3.11.7",
        versions=VERSIONS,
        backend="tensorflow",
        mpi="Open MPI v5.0.11",
        folder="same",
        memlock_bytes=-1,
        shm_bytes=1_000_000_000,
        shm_free_bytes=500_000_000,
        names={"a": ("10.0.0.1",), "b": ("10.0.0.2",), "c": ("10.0.0.3",)},
        local_address=f"10.0.0.{' abc'.index(name)}",
        interface="eth0",
        speed_mbit=10000,
        cores=8,
        load=0.25,
    )
    return dataclasses.replace(default, **changes)


def answer(name: str, ranks: int = 2, **changes: Any) -> Answer:
    return Answer(
        host=name, ranks=ranks, facts=facts(name, **changes), asked_s=100.0, answered_s=101.5
    )


def lost(name: str, kind: FailureKind, message: str = "") -> Answer:
    return Answer(host=name, ranks=2, failure=Failure(kind=kind, message=message))


def problems(*answers: Answer, method: Method = "ssh", **launcher: Any) -> list[Problem]:
    return find_problems(answer("a", **launcher), answers, method=method, python=PYTHON)


def the_problem(*answers: Answer, method: Method = "ssh", **launcher: Any) -> Problem:
    (problem,) = problems(*answers, method=method, **launcher)
    return problem
