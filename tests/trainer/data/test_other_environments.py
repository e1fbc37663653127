"""The tests of this folder with Keras' other backends, and with data of other packages.

Each environment runs many tests in one process, because importing Keras takes seconds.
"""

from __future__ import annotations

import pytest

from tests.harness.jobs import REPOSITORY

FOLDER = "tests/trainer/data"

# Arguments: files of tests without TensorFlow, and after "--" arguments for tests with it.
PROGRAM = """
import os, sys, pytest

os.chdir(os.environ["PYTHONPATH"])

def run(arguments):
    code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments])
    if code:
        sys.exit(int(code))

files, with_tensorflow = sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:]
if files:
    sys.modules["tensorflow"] = None
    run(files)
    del sys.modules["tensorflow"]
if with_tensorflow:
    run(with_tensorflow)
"""

NEUTRAL = ["test_arrays.py", "test_pydataset.py", "test_batch_stream.py", "test_host_batches.py"]
PIPELINES = ["tensorflow/test_arrays.py", "test_begin.py"]
PIPELINES += ["-kresumes and that-shuffles or kinds or components"]
BEGIN = ["test_begin.py", "-knot pipeline and not endless"]


@pytest.mark.parametrize(
    ("environment_name", "backend", "neutral", "with_tensorflow"),
    [
        ("torch", "torch", ["with_torch.py", *NEUTRAL, *BEGIN], ["tensorflow/test_arrays.py"]),
        ("jax", "jax", ["with_scipy.py", *NEUTRAL, *BEGIN], PIPELINES),
        ("torch", "tensorflow", [], ["with_torch.py"]),
        ("optional", "tensorflow", [], ["with_pandas.py", "with_scipy.py", "with_grain.py"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_input(
    environment, run_command, environment_name, backend, neutral, with_tensorflow
) -> None:
    python = environment(environment_name)
    arguments = [
        name if name.startswith("-") else f"{FOLDER}/{name}"
        for name in [*neutral, "--", *with_tensorflow]
    ]
    done = run_command(
        [python, "-c", PROGRAM, *arguments],
        env={"KERAS_BACKEND": backend, "PYTHONPATH": str(REPOSITORY)},
        timeout_s=300,
    )
    assert done.returncode == 0, done
    assert "skipped" not in done.stdout
