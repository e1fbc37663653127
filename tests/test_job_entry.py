from __future__ import annotations

import shlex
import textwrap
from pathlib import Path

import pytest

from hvdtrain.cluster.engine_choice import EngineChoice
from hvdtrain.errors import ConfigurationError
from hvdtrain.job_entry import _check_compression, _host_indices


def test_host_indices_follow_the_first_ranks() -> None:
    hosts = ["b", "a", "b", "c", "a"]
    assert _host_indices(hosts) == (0, 1, 0, 2, 1)


@pytest.mark.parametrize(
    ("library", "compression", "on_gpus"),
    [
        ("mpi", "powersgd:4", True),
        ("horovod", "none", False),
        ("nccl", "fp16", True),
        ("nccl", "bf16", False),
    ],
)
def test_supported_compressions(library, compression: str, on_gpus: bool) -> None:
    _check_compression(EngineChoice(library, "a reason"), compression, on_gpus=on_gpus)


@pytest.mark.parametrize(
    ("library", "compression", "on_gpus", "advice"),
    [
        ("horovod", "fp16", False, "Omit it, or pass --backend mpi"),
        ("nccl", "bf16", True, "Use fp16, or"),
        ("nccl", "int8", False, "Use bf16, or"),
        ("nccl", "powersgd:4", True, "Use fp16, or"),
    ],
)
def test_unsupported_compressions(library, compression: str, on_gpus: bool, advice: str) -> None:
    text = f"--compression {compression} needs MPI, but {library} .*: a reason. {advice}"
    with pytest.raises(ConfigurationError, match=text):
        _check_compression(EngineChoice(library, "a reason"), compression, on_gpus=on_gpus)


ON_GPUS = """
    import keras
    import numpy as np
    import hvdtrain
    from hvdtrain import world
    from hvdtrain.cluster.gpus import Gpu
    from hvdtrain.frameworks.tensorflow import devices

    bind = devices.bind
    devices.bind = lambda *args: [Gpu(f"GPU-{rank}") for rank, _ in enumerate(bind(*args))]
    hvdtrain.init()
    engine = world.collectives()
    buckets = []
    reduce = engine.grouped_allreduce

    def observe(arrays, *args, **options):
        buckets.append(sum(array.nbytes for array in arrays))
        return reduce(arrays, *args, **options)

    engine.grouped_allreduce = observe
    layers = [keras.layers.Dense(1500, use_bias=False) for _ in range(2)]
    model = keras.Sequential([keras.Input([1500]), *layers])
    model.compile("sgd", "mse")
    hvdtrain.distribute(model)
    model.fit(np.ones([2, 1500]), np.ones([2, 1500]), batch_size=1, verbose=0)
    print("buckets:", [nbytes for nbytes in buckets if nbytes >= 1500 * 1500 * 4], flush=True)
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [("auto", 2), ("0", 1)])
def test_gradients_of_gpus_on_one_host_are_reduced_in_buckets(
    launch, bucket_bytes: str, buckets: int
) -> None:
    env = {"HVDTRAIN_BACKEND": "mpi", "HVDTRAIN_BUCKET_BYTES": bucket_bytes}
    done = launch(2, ON_GPUS, env=env, timeout_s=100)
    sizes = [1500 * 1500 * 4 * 2 // buckets] * buckets
    assert done.stdout.count(f"buckets: {sizes}\n") == 2, done


CHILDREN = """
    import multiprocessing, subprocess, sys
    import numpy as np
    import hvdtrain

    def enter(_):
        import hvdtrain
        hvdtrain.init()
        return f"{hvdtrain.rank()} of {hvdtrain.size()}"

    if __name__ == "__main__":
        hvdtrain.init()
        if hvdtrain.is_chief():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results = pool.map(enter, [0])
        else:
            code = "import hvdtrain as h; h.init(); print(f'{h.rank()} of {h.size()}')"
            argv = [sys.executable, "-c", code]
            results = subprocess.check_output(argv, text=True, timeout=100).split("\\n")
        hvdtrain.world.collectives().barrier()
        print(f"rank {hvdtrain.rank()} of {hvdtrain.size()}, child {results[0]}", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.more
@pytest.mark.parametrize(("mode", "backend"), [("allreduce", "jax"), ("async-ps", "tensorflow")])
def test_children_of_a_rank_work_alone(
    run_command, mpirun, tmp_path: Path, mode: str, backend: str, python_with
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(CHILDREN))
    command = shlex.join([*python_with(backend), str(tmp_path / "train.py")])
    (tmp_path / "train.sh").write_text(f"{command}\necho done\n")
    program = ["bash", str(tmp_path / "train.sh")]
    done = run_command(
        mpirun(2, program), timeout_s=100, env={"HVDTRAIN_MODE": mode, "KERAS_BACKEND": backend}
    )
    assert done.returncode == 0, done.stderr
    size = 1 if mode == "async-ps" else 2
    for rank in range(2):
        assert f"rank {rank} of {size}, child 0 of 1\n" in done.stdout
    assert (
        done.stderr.count("this process works alone and on the CPU, because it is a child of") == 2
    )
