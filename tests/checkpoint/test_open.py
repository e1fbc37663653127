"""The ways in docs/checkpoints.md to open a checkpoint without hvdtrain."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from tests.harness.jobs import REPOSITORY

BLOCKED = """
import sys
sys.modules["hvdtrain"] = None  # makes an import fail
"""


def _snapshot() -> Snapshot:
    return Snapshot(
        step=80,
        state={"epoch": 3, "best": float("inf")},
        model={
            "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
            "half": np.ones(2, ml_dtypes.bfloat16),
            "eighth": np.array([1.5, -2], ml_dtypes.float8_e4m3fn),
            "wave": np.array([1 + 2j]),
        },
        ranks={"rank/0/seed": np.array([7, 8])},
    )


def test_the_program_in_the_docs_reads_a_checkpoint(tmp_path: Path, run_command) -> None:
    folder = Store(tmp_path / "runs" / "mnist").write(_snapshot())
    assert folder.name == "step-00000080"
    text = (REPOSITORY / "docs" / "checkpoints.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (program,) = [block for block in blocks if "safe_open" in block]
    done = run_command([sys.executable, "-c", BLOCKED + program])
    assert done.returncode == 0, done
    assert "weights float32 (2, 3)" in done.stdout
    assert "eighth float8_e4m3fn (2,)" in done.stdout


def test_sha256sum_accepts_the_checksums(tmp_path: Path, run_command) -> None:
    folder = Store(tmp_path).write(_snapshot())
    program = f"""{BLOCKED}
import json, subprocess
files = json.load(open("{folder}/manifest.json"))["files"]
lines = "".join(f"{{facts['sha256']}}  {folder}/{{name}}\\n" for name, facts in files.items())
subprocess.run(["sha256sum", "--check", "--quiet"], input=lines, text=True, check=True)
print(len(files))
"""
    done = run_command([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, "3\n"), done
