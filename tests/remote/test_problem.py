from __future__ import annotations

import pytest

from hvdtrain.remote.remote_probe import FailureKind, Method
from tests.check.answers import answer, lost, the_problem

REMEDIES: dict[str, tuple[Method, FailureKind, str]] = {
    "unknown name": ("ssh", "unknown name", "getent hosts b must find it"),
    "timed out": ("ssh", "timed out", "ping -c1 b"),
    "no route": ("ssh", "no route", "ping -c1 b"),
    "key refused": ("ssh", "key refused", "ssh-copy-id b"),
    "host key": ("ssh", "host key", "ssh-keyscan -H b >> ~/.ssh/known_hosts"),
    "ssh failed": ("ssh", "ssh failed", "ssh -v b true"),
    "srun failed": ("srun", "srun failed", "scontrol show node b"),
    "srun timed out": ("srun", "timed out", "scontrol show node b"),
    "no Python": ("ssh", "no Python", "python3 -m venv /venv"),
    "no hvdtrain": ("ssh", "no hvdtrain", "ssh b /venv/bin/python -m pip install"),
    "no hvdtrain, srun": ("srun", "no hvdtrain", "srun -N1 -w b /venv/bin/python -m pip"),
    "no answer": ("ssh", "no answer", "ssh b /venv/bin/python -c pass"),
}


@pytest.mark.parametrize(("method", "kind", "remedy"), REMEDIES.values(), ids=REMEDIES)
def test_remedies(method: Method, kind: FailureKind, remedy: str) -> None:
    problem = the_problem(
        answer("a"), lost("b", kind, "its message"), lost("c", kind), method=method
    )
    assert problem.hosts == ("b", "c")
    assert problem.summary.endswith("(its message)")
    assert remedy in problem.remedy
    assert problem.is_error


def test_the_remedy_for_a_refused_key_names_the_user() -> None:
    problem = the_problem(
        answer("a"), lost("b", "key refused", "me@b: Permission denied (publickey).")
    )
    assert problem.remedy.startswith("ssh-copy-id me@b (")
    assert problem.remedy.endswith("ssh -o BatchMode=yes me@b true")
