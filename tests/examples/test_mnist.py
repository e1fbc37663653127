"""The main example, which new users run first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.digits import MNIST, write_few
from tests.harness.jobs import REPOSITORY, Completed
from tests.launch.jobs import COLLAPSING

STEP = re.compile(r"step \d+, loss = \d+\.\d\d \(\d+\.\d examples/sec; \d+\.\d{3} sec/batch\)")


def _test_accuracy(done: Completed) -> float:
    assert done.returncode == 0, done
    (accuracy,) = re.findall(r"^test accuracy = ([\d.]+)$", done.stdout, re.MULTILINE)
    return float(accuracy)


@pytest.mark.essential
@pytest.mark.timeout(600)
def test_two_ranks_learn_the_digits(launch, tmp_path: Path) -> None:
    # As users start it, without preloaded modules and with oneDNN.
    lengths = ("--epochs", "2", "--batch-size", "32")
    env = {"TF_ENABLE_ONEDNN_OPTS": None}
    done = launch(2, MNIST, *lengths, timeout_s=480, fresh=True, env=env)
    accuracy = _test_accuracy(done)
    assert accuracy >= 0.95, done

    lines = [line for line in done.stdout.splitlines() if line.strip()]
    # 4,000 digits in joint batches of 64: 63 steps in each of 2 epochs.
    assert [line.split(",")[0] for line in lines if STEP.fullmatch(line)] == [
        f"step {step}" for step in range(10, 127, 10)
    ]
    assert sum(line.startswith("epoch ") and "val_accuracy" in line for line in lines) == 2
    assert "model: runs/mnist/model.keras" in lines
    logs = tmp_path / "runs/mnist/logs"
    assert f"TensorBoard: tensorboard --logdir {logs.relative_to(tmp_path)}" in lines
    # Only the chief writes.
    assert len(list((logs / "train").glob("events.out.*"))) == 1

    assert _evaluate_without_hvdtrain(launch) == pytest.approx(accuracy, abs=1e-4)


def _evaluate_without_hvdtrain(launch, data_dir: Path | None = None) -> float:
    done = launch(
        None,
        f"""
        import sys
        sys.modules["hvdtrain"] = sys.modules["mpi4py"] = None  # as if not installed
        sys.path.insert(0, {str(MNIST.parent)!r})
        from pathlib import Path
        import keras
        from mnist_data import load_digits

        # The optimizer that Keras saves on torch can only be loaded on torch.
        model = keras.models.load_model("runs/mnist/model.keras", compile={data_dir is None})
        digits = load_digits(*map(Path, {[] if data_dir is None else [str(data_dir)]!r}))
        outputs = model.predict(digits.test_images[..., None], verbose=0)
        accuracy = (outputs.argmax(axis=1) == digits.test_labels).mean()
        print(f"test accuracy = {{accuracy:.4f}}")
        """,
        fresh=data_dir is None,
    )
    return _test_accuracy(done)


WITHOUT_TENSORFLOW = f"""
import runpy, sys
assert "tensorflow" not in sys.modules
sys.path[:0] = ["blocked", {str(MNIST.parent)!r}]
runpy.run_path({str(MNIST)!r}, run_name="__main__")
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_two_ranks_learn_on_another_backend(
    run_command, launch, python_with, backend: str, tmp_path: Path
) -> None:
    # Make TensorFlow unavailable.
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "tensorflow.py").write_text("raise ModuleNotFoundError(__name__)")
    data = write_few(tmp_path)
    program = ("-c", WITHOUT_TENSORFLOW, "--epochs", "4", "--batch-size", "32")
    done = run_command(
        [*COLLAPSING, "-np", "2", "--", *python_with(backend), *program, "--data-dir", str(data)],
        env={"KERAS_BACKEND": backend},
        timeout_s=200,
    )
    assert done.returncode == 0, done
    (accuracy,) = re.findall(r"^\[0\] test accuracy = ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) > 0.7
    # The saved model works on TensorFlow.
    on_tensorflow = _evaluate_without_hvdtrain(launch, data)
    assert on_tensorflow == pytest.approx(float(accuracy), abs=0.01)


def test_a_single_process_runs_without_mpi(launch, tmp_path: Path) -> None:
    # Make mpi4py unavailable.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['mpi4py'] = None")
    done = launch(
        None,
        MNIST,
        *("--epochs", "4", "--data-dir", str(write_few(tmp_path))),
        *("--run-dir", "results", "--checkpoint-dir", "saved"),
        env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        timeout_s=100,
    )
    assert _test_accuracy(done) > 0.7
    assert (tmp_path / "results" / "model.keras").exists()
    assert (tmp_path / "results" / "logs").is_dir()
    assert (tmp_path / "saved" / "step-00000040" / "manifest.json").exists()
