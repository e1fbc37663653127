"""What to do about hosts that gave no answer."""

from __future__ import annotations

import pytest

from hvdtrain.remote.remote_probe import FailureKind, Way
from tests.check.answers import answer, lost, the_problem

REMEDIES: dict[str, tuple[Way, FailureKind, str]] = {
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


@pytest.mark.parametrize(("way", "kind", "remedy"), REMEDIES.values(), ids=REMEDIES)
def test_every_way_of_being_lost_has_a_remedy(way: Way, kind: FailureKind, remedy: str) -> None:
    found = the_problem(answer("a"), lost("b", kind, "so it said"), lost("c", kind), way=way)
    assert found.hosts == ("b", "c")
    assert found.found.endswith("(so it said)")
    assert remedy in found.remedy
    assert found.error


def test_a_refused_key_is_copied_for_the_user_that_was_refused() -> None:
    found = the_problem(
        answer("a"), lost("b", "key refused", "me@b: Permission denied (publickey).")
    )
    assert found.remedy.startswith("ssh-copy-id me@b (")
    assert found.remedy.endswith("ssh -o BatchMode=yes me@b true")
