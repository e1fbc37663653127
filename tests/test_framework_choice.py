"""The framework that ``hvdtrain.init()`` chooses, and errors about frameworks."""

from __future__ import annotations

import json
import sys

import pytest

from tests.harness.jobs import mpirun_argv

# On each rank, the value of the variable RANKS gives the backend of Keras. INIT is the argument of
# hvdtrain.init().
_PROGRAM = """
import os, sys
sys.modules.update({name: None for name in os.environ.get("WITHOUT", "").split()})
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
os.environ["KERAS_BACKEND"] = "".join(os.environ["RANKS"].split()[rank : rank + 1])
if "keras" in sys.argv:
    import keras
    os.environ["KERAS_BACKEND"] = "tensorflow"
import hvdtrain
from hvdtrain.errors import HvdtrainError
try:
    hvdtrain.init(os.environ.get("INIT"))
except HvdtrainError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit()
print(hvdtrain.world.framework())
"""


@pytest.mark.parametrize("arguments", [[], ["keras"]], ids=["init first", "Keras first"])
def test_init_binds_the_devices_of_keras_backend(environment, run_command, arguments) -> None:
    argv = [environment("jax"), "-c", _PROGRAM, *arguments]
    done = run_command(mpirun_argv(2, argv), env={"RANKS": "jax jax", "WITHOUT": "tensorflow"})
    assert done.stdout.splitlines() == ["jax"] * 2, done


def test_keras_json_names_the_backend(environment, run_command, tmp_path) -> None:
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
    program = (
        "import os; os.environ.pop('KERAS_BACKEND', None); import hvdtrain; hvdtrain.init(); "
        "print(hvdtrain.world.framework())"
    )
    done = run_command([environment("jax"), "-c", program], env={"KERAS_HOME": str(tmp_path)})
    assert done.stdout == "jax\n", done


def test_errors_about_frameworks_are_raised_on_every_rank(environment, run_command) -> None:
    argv = mpirun_argv(2, [environment("jax"), "-c", _PROGRAM])

    def errors(**variables: str) -> list[str]:
        done = run_command(argv, env={"RANKS": "jax jax", **variables})
        lines = done.stdout.splitlines()
        assert len(lines) == 2, done
        assert lines[0] == lines[1]
        return lines

    assert "got JAX on rank 0 and PyTorch on rank 1" in errors(RANKS="jax torch")[0]
    assert "--mode local-sgd needs Keras on TensorFlow" in errors(HVDTRAIN_MODE="local-sgd")[0]
    assert "--backend nccl (HVDTRAIN_BACKEND) needs" in errors(HVDTRAIN_BACKEND="nccl")[0]
    assert "Horovod combines gradients (--backend" in errors(HVDTRAIN_BACKEND="horovod")[0]
    wrong = "can't train with the framework 'mxnet' (KERAS_BACKEND); set KERAS_BACKEND to one of"
    assert wrong in errors(RANKS="mxnet mxnet")[0]
    missing = errors(WITHOUT="jax")[0]
    assert "framework of this program is jax (KERAS_BACKEND), but JAX is not installed" in missing
    assert 'install "hvdtrain[jax]", or set KERAS_BACKEND to another framework' in missing


def test_a_missing_framework_is_a_launch_error_that_names_what_selected_it(
    run_command, tmp_path
) -> None:
    def error(**variables: str) -> str:
        variables = {"RANKS": "", "KERAS_HOME": str(tmp_path), **variables}
        done = run_command([sys.executable, "-c", _PROGRAM], env=variables)
        return done.stdout

    start = "LaunchError: The framework of this program is"
    text = error(RANKS="tensorflow", WITHOUT="tensorflow")
    assert text.startswith(f"{start} tensorflow (KERAS_BACKEND), but TensorFlow is not installed;")
    assert error(WITHOUT="tensorflow").startswith(f"{start} tensorflow (Keras' default)")
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "torch"}))
    assert error(WITHOUT="torch").startswith(f"{start} torch ({tmp_path / 'keras.json'})")
    text = error(INIT="jax", WITHOUT="jax")
    assert text.startswith(f"{start} jax (argument of hvdtrain.init()), but JAX is not installed;")
    assert text.endswith("or pass another framework to hvdtrain.init().\n")
    assert "; pass one of tensorflow, torch, jax to hvdtrain.init()" in error(INIT="mxnet")


def test_distribute_needs_the_framework_of_init(run_command, python_with) -> None:
    program = """
import hvdtrain
hvdtrain.init("tensorflow")
import keras
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    hvdtrain.distribute(model)
except hvdtrain.errors.ModelError as error:
    print(error)
"""
    argv = mpirun_argv(2, [*python_with("torch"), "-c", program])
    done = run_command(argv, env={"KERAS_BACKEND": "torch"})
    message = "prepared devices for tensorflow, but the Keras backend is torch"
    assert done.stdout.count(message) == 2, done
