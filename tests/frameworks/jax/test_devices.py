"""The binding of ranks to GPUs in programs that use JAX, with a fake driver."""

from __future__ import annotations

from tests.harness.fake_driver import GIB, A, B, FakeDriver
from tests.harness.jobs import mpirun_argv

_TWO_GPUS = "".join(
    f"gpu {uuid}\nmodel NVIDIA H100\nbus 0000:{bus}:00.0\nmemory {80 * GIB}\n"
    for uuid, bus in ((A, "3B"), (B, "5E"))
)
# JAX's build for CPUs has no plugin for CUDA. The program pretends that it is installed.
_PROGRAM = """
import sys, jax
import hvdtrain
from hvdtrain.cluster.gpus import cuda_gpus
from hvdtrain.errors import LaunchError
from hvdtrain.frameworks.jax import devices

if "plugin" in sys.argv:
    devices._has_cuda = lambda: True
if "used" in sys.argv:
    jax.numpy.zeros(())
try:
    hvdtrain.init("jax")
except LaunchError as error:
    sys.exit(f"LaunchError: {error}")
print("bound", cuda_gpus()[int(jax.config.values["jax_cuda_visible_devices"])].id)
"""


def test_ranks_bind_their_gpus_unless_jax_already_uses_all(
    environment, run_command, fake_driver: FakeDriver
) -> None:
    environ = {**fake_driver.environ(_TWO_GPUS), "CUDA_VISIBLE_DEVICES": "0,1"}
    program = [environment("jax"), "-c", _PROGRAM]
    done = run_command(mpirun_argv(2, [*program, "plugin"]), env=environ)
    assert done.returncode == 0, done
    assert sorted(done.stdout.split()) == sorted(["bound", A, "bound", B])
    shared = {**environ, "CUDA_VISIBLE_DEVICES": "0", "HVDTRAIN_SHARE_GPUS": "1"}
    done = run_command(mpirun_argv(2, [*program, "plugin"]), env=shared)
    assert done.stdout.split() == ["bound", A, "bound", A], done
    assert done.stderr.count("each JAX process reserves 75 % of a GPU's memory") == 1, done
    done = run_command(mpirun_argv(2, [*program, "plugin", "used"]), env=environ)
    assert done.returncode != 0
    assert "JAX has reserved memory on all 2 GPUs" in done.stderr, done
    done = run_command(program, env=environ)
    assert "has GPUs, but JAX is installed without CUDA: python -m pip" in done.stderr, done


_CONVOLUTION = """
import hvdtrain, keras
hvdtrain.init()
from hvdtrain.bench.measure_training import build_model, synthetic_data
model = hvdtrain.distribute(build_model("lenet"))
x, y = synthetic_data(model, 64 * 30 * 2)
model.fit(x, y, batch_size=64, verbose=0)
print("trained")
"""


def test_a_rank_with_one_core_does_not_wait_for_itself(environment, run_command) -> None:
    program = [environment("jax"), "-c", _CONVOLUTION]
    env = {"KERAS_BACKEND": "jax", "NPROC": "1"}
    done = run_command(mpirun_argv(2, program), env=env)
    assert done.stdout.split() == ["trained", "trained"], done
