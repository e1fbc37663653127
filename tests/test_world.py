from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from hvdtrain import world
from hvdtrain.errors import NotInitializedError
from tests.harness.jobs import REPOSITORY

ACCESSORS = [
    world.collectives,
    world.device_collectives,
    world.framework,
    world.hosts,
    world.is_chief,
    world.local_rank,
    world.local_size,
    world.node_rank,
    world.rank,
    world.roles,
    world.settings,
    world.size,
    world.topology,
]


def test_accessors_raise_before_init() -> None:
    code = """if True:
        from hvdtrain import world
        from hvdtrain.errors import NotInitializedError
        assert not world.is_initialized()
        world.shutdown()
        world.stop_timeline()
        others = {"init", "shutdown", "is_initialized", "start_timeline", "stop_timeline"}
        for name in sorted(set(world.__all__) - others):
            try:
                getattr(world, name)()
            except NotInitializedError as error:
                assert "hvdtrain.init()" in str(error)
                print(name)
    """
    argv = [sys.executable, "-c", code]
    shown = subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=60)
    assert shown.split() == sorted(accessor.__name__ for accessor in ACCESSORS)


@pytest.mark.ranks(1, 2, 3)
def test_rank_and_size(rank_count: int) -> None:
    world.init()
    try:
        assert world.size() == world.local_size() == world.collectives().size == rank_count
        assert world.rank() == world.local_rank() == world.collectives().rank
        assert world.node_rank() == 0
        assert world.is_chief() == (world.rank() == 0)
        ranks = world.collectives().allgather_object(world.rank(), name="test")
        assert ranks == list(range(rank_count))
        assert world.topology().size == rank_count
        assert world.framework() == "tensorflow"
    finally:
        world.shutdown()


@pytest.mark.ranks(1, 2)
def test_init_twice_and_shutdown() -> None:
    world.init()
    before = world.collectives(), world.topology(), world.settings()
    world.init()
    assert (world.collectives(), world.topology(), world.settings()) == before
    assert world.collectives() is before[0]
    world.shutdown()
    world.shutdown()
    assert not world.is_initialized()
    with pytest.raises(NotInitializedError):
        world.rank()


@pytest.mark.ranks(2)
def test_unseeded_shuffles_agree_between_ranks() -> None:
    import tensorflow as tf

    orders = []
    for _ in range(2):
        tf.random.set_seed(None)
        world.init()
        try:
            order = [int(item) for item in tf.data.Dataset.range(50).shuffle(50)]
            everyone = world.collectives().allgather_object(order, name="test")
        finally:
            world.shutdown()
        assert everyone[0] == everyone[1]
        orders.append(order)
    assert orders[0] != orders[1], "each job has its own seed"


@pytest.mark.mpi
def test_a_contradiction_between_launcher_and_mpi_ends_the_job(launch) -> None:
    done = launch(
        None,
        "import hvdtrain; hvdtrain.init(); print('trained alone')",
        env={
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "4",
            "SLURM_GTIDS": "0,1,2,3",
        },
    )
    assert done.returncode == 1, done
    assert "trained alone" not in done.stdout
    assert "rank 0 of 4" in done.stderr
    assert "srun --mpi=pmix" in done.stderr


@pytest.mark.mpi
def test_ranks_with_different_settings_are_an_error(launch) -> None:
    script = """
        import os
        import hvdtrain

        rank = next(filter(None, map(os.environ.get, ("OMPI_COMM_WORLD_RANK", "PMI_RANK"))))
        os.environ["HVDTRAIN_SYNC_EVERY"] = "5" + rank
        try:
            hvdtrain.init()
        except hvdtrain.MismatchError as error:
            print(f"{error}\\n", end="", flush=True)
    """
    done = launch(2, textwrap.dedent(script), env={"HVDTRAIN_MODE": "local-sgd"})
    assert done.stdout.count("HVDTRAIN_SYNC_EVERY must be the same on all ranks, got 50") == 2, done
