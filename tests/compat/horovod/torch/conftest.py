"""Programs that use PyTorch, on several ranks."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.harness.forkserver import can_fork
from tests.harness.jobs import mpirun_argv

START = """
import pytest, torch
import hvdtrain.torch as hvd

torch.set_num_threads(1)
hvd.init()
rank, size = hvd.rank(), hvd.size()
"""


@pytest.fixture
def on_ranks(environment, python_with, run_command, tmp_path: Path) -> Callable[..., None]:
    """Run functions, which must not use names of their module, on ranks with PyTorch.

    All functions run in one job, in order. ``torch``, ``hvd``, ``pytest``, ``rank`` and
    ``size`` are defined. ``fresh=True`` starts Pythons that have not imported Keras.
    """

    def run(np: int, *functions: FunctionType, fresh: bool = False, **variables: str) -> None:
        fresh = fresh or not can_fork(variables)
        python = [str(environment("torch"))] if fresh else python_with("torch")
        sources = [textwrap.dedent(inspect.getsource(function)) for function in functions]
        calls = [f"{function.__name__}()" for function in functions]
        path = tmp_path / "program.py"
        path.write_text("\n".join([START, *sources, *calls, 'print("done", rank)']))
        done = run_command(
            mpirun_argv(np, [*python, str(path)]),
            env=variables or None,
            timeout_s=100,
        )
        assert done.returncode == 0, done
        assert sorted(_lines(done)) == [f"done {rank}" for rank in range(np)], done

    return run


def _lines(done: Any) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("done")]
