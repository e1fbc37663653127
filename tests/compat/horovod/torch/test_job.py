"""Jobs that use PyTorch: what they load, and how they end."""

from __future__ import annotations

# ruff: noqa: F821


def no_tensorflow():
    import sys

    hvd.allreduce(torch.ones(3))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
    weight.sum().backward()
    optimizer.step()
    assert not {"tensorflow", "keras"} & set(sys.modules)


def every_name():
    for name in dir(hvd):
        getattr(hvd, name)
    for name in dir(hvd.elastic):
        getattr(hvd.elastic, name)
    assert (hvd.local_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (rank, 1, True)
    assert hvd.mpi_built()
    assert not hvd.nccl_built()
    import hvdtrain

    assert hvdtrain.rank() == rank
    hvdtrain.init()  # again, without effect


def restart():
    hvd.allreduce_async(torch.ones(3), name="pending")
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(RuntimeError, match="init"):
        hvd.allreduce(torch.ones(1))


def own_part_of_a_gpu():
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"MIG-{'ab'[rank]}"


def test_each_rank_gets_a_part_of_a_gpu(on_ranks):
    on_ranks(2, own_part_of_a_gpu, CUDA_VISIBLE_DEVICES="MIG-a,MIG-b")


def test_torch_is_loaded_without_tensorflow(on_ranks):
    on_ranks(2, no_tensorflow, every_name, restart, fresh=True)


def test_plain_init_after_import_of_hvdtrain_torch(environment, run_command):
    program = (
        "import sys, hvdtrain, hvdtrain.torch; hvdtrain.init(); "
        "print('torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    done = run_command([environment("torch"), "-c", program])
    assert (done.returncode, done.stdout) == (0, "True False\n"), done


def test_settings_that_need_tensorflow(environment, run_command):
    program = "import hvdtrain.torch as hvd; hvd.init()"
    for variable, value in (("HVDTRAIN_MODE", "local-sgd"), ("HVDTRAIN_BACKEND", "nccl")):
        done = run_command([environment("torch"), "-c", program], env={variable: value})
        assert done.returncode != 0
        assert f"{value}" in done.stderr
        assert "PyTorch" in done.stderr
