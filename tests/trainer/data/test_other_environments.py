"""The tests of this folder with Keras' other backends, and with data of other packages.

Each environment runs many tests in one process, because importing Keras takes seconds.
"""

from __future__ import annotations

import os

import pytest

from tests.environments import folder_of
from tests.harness.jobs import REPOSITORY

FOLDER = "tests/trainer/data"

# Arguments: files of tests without TensorFlow, and after "--" arguments for tests with it.
PROGRAM = """
import os, sys, pytest

os.chdir(os.environ["PYTHONPATH"])
sys.path += os.environ["MORE_PACKAGES"].split(os.pathsep)  # before Keras looks for pandas

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


PACKAGES = ["with_torch.py", "with_grain.py", "with_pandas.py"]


@pytest.mark.parametrize(
    ("names", "backend", "neutral", "with_tensorflow"),
    [
        (
            ("torch", "optional"),
            "torch",
            [*PACKAGES, *NEUTRAL, *BEGIN],
            ["tensorflow/test_arrays.py"],
        ),
        (
            ("jax", "torch", "optional"),
            "jax",
            [*PACKAGES, "with_scipy.py", *NEUTRAL, *BEGIN],
            PIPELINES,
        ),
        (("optional", "torch"), "tensorflow", [], [*PACKAGES, "with_scipy.py"]),
    ],
    ids=["torch", "jax", "tensorflow"],
)
def test_input(environment, run_command, names, backend, neutral, with_tensorflow) -> None:
    """The first environment has the Python, and the others have more packages."""
    python, *_ = map(environment, names)
    packages = [path for name in names[1:] for path in folder_of(name).glob("lib/*/site-packages")]
    arguments = [
        name if name.startswith("-") else f"{FOLDER}/{name}"
        for name in [*neutral, "--", *with_tensorflow]
    ]
    done = run_command(
        [python, "-c", PROGRAM, *arguments],
        env={
            "KERAS_BACKEND": backend,
            "PYTHONPATH": str(REPOSITORY),
            "MORE_PACKAGES": os.pathsep.join(map(str, packages)),
        },
        timeout_s=300,
    )
    assert done.returncode == 0, done
    assert "skipped" not in done.stdout
