"""Versions that differ, or are missing, and whose."""

from __future__ import annotations

from typing import Any

from hvdtrain.remote.problem import Problem
from tests.check.answers import VERSIONS, answer, the_problem


def test_versions_that_differ_name_who_has_what() -> None:
    other = answer("b", versions={**VERSIONS, "keras": "3.12.0"})
    assert the_problem(answer("a"), other, answer("c")) == Problem(
        hosts=("b",),
        found="Keras differs: 3.15.1 on a, c; 3.12.0 on b",
        expected="3.15.1 everywhere, as on the launcher",
        remedy="there: python -m pip install keras==3.15.1",
    )


def test_a_launcher_that_differs_from_all() -> None:
    found = the_problem(answer("b"), answer("c"), python="3.12.1")
    assert found.hosts == ("b", "c")
    assert found.found == "Python differs: 3.12.1 on the launcher; 3.11.7 on b, c"


def test_a_missing_package_is_a_difference() -> None:
    found = the_problem(answer("a"), answer("b", versions={**VERSIONS, "tensorflow": ""}))
    assert found.found == "TensorFlow differs: 2.21.0 on a; none on b"


def test_what_only_the_launcher_lacks() -> None:
    found = the_problem(answer("b"), answer("c"), versions={**VERSIONS, "keras": ""})
    assert found.found == "Keras differs: none on the launcher; 3.15.1 on b, c"
    assert found.remedy == "on the launcher: python -m pip install keras==3.15.1"


def test_what_nobody_has() -> None:
    without = {name: version for name, version in VERSIONS.items() if name != "tensorflow"}
    changes: dict[str, Any] = {"versions": without}
    found = the_problem(answer("a", **changes), answer("b", **changes), **changes)
    assert found.found == "TensorFlow is missing"
    assert found.hosts == ("a", "b")
    assert 'pip install "hvdtrain[cpu]"' in found.remedy


def test_an_mpi_that_can_not_be_loaded_says_why() -> None:
    broken = answer("b", mpi="", mpi_error="RuntimeError: cannot load MPI library")
    found = the_problem(answer("a"), broken)
    assert found.found == (
        "MPI differs: Open MPI v5.0.11 on a; none on b (RuntimeError: cannot load MPI library)"
    )
