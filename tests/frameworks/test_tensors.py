"""The same checks for the functions of each framework, in a process with this framework."""

from __future__ import annotations

import pytest

from tests.harness.jobs import REPOSITORY

PROGRAM = REPOSITORY / "tests" / "frameworks" / "tensor_cases.py"


@pytest.mark.parametrize("name", ["tensorflow", "torch", "jax"])
def test_cases(name: str, python_with, run_command) -> None:
    done = run_command([*python_with(name), PROGRAM, name], timeout_s=100)
    assert done.returncode == 0, done
    if name == "jax":
        assert done.stderr == ""  # JAX does not log errors that the program receives
    # No other framework was imported.
    assert done.stdout.splitlines()[-1] == "loaded:", done
