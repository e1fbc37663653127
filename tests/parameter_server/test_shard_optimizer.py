import keras
import numpy as np
import pytest

from hvdtrain.errors import ModelError
from hvdtrain.parameter_server.shard_optimizer import (
    check_optimizer,
    split_state,
    unsplittable_variables,
)
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.parameter_server.variable_table import VariableTable
from tests.parameter_server.tables import (
    RATES,
    KeepsGradient,
    NoConfig,
    OddState,
    Servers,
    assert_close,
    flat_gradients,
    make_gradients,
    make_variables,
)

opt = keras.optimizers


def test_variables_have_the_paths_of_the_models():
    variables = make_variables()
    for shard in shard_variables(specs_of(variables), 2):
        table = VariableTable(opt.SGD(0.1), shard, variables)
        paths = [v.path for v in table._variables]
        assert paths == [variables[piece.variable].path for piece in shard.pieces]


def test_variables_with_a_constraint_are_not_split():
    variables, others = [make_variables(constraint=keras.constraints.MaxNorm(0.5)) for _ in "ab"]
    expected = opt.SGD(0.1)
    optimizer = opt.SGD(0.1)
    assert unsplittable_variables(optimizer, others) == {0}
    servers = Servers(optimizer, others, 3)
    for step in range(3):
        expected.apply(make_gradients(step, variables), variables)
        servers.apply(make_gradients(step, variables))
    assert_close(servers.weights(), [v.value for v in variables])
    assert np.linalg.norm(servers.weights()[0], axis=0).max() <= 0.5001
    shard = shard_variables(specs_of(others), 4)[0]
    assert shard.pieces[0].shape != (7, 6)
    with pytest.raises(ModelError, match=r"dense/kernel has the constraint MaxNorm"):
        VariableTable(optimizer, shard, others)


def test_variables_such_as_float8_scales_are_overwritten_with_their_gradients():
    variables = make_variables()
    variables[1].overwrite_with_gradient = True
    servers = Servers(compiled := opt.Adam(0.1), variables, 2)
    gradients = make_gradients(0, variables)
    servers.apply(gradients)
    assert_close([servers.weights()[1]], [gradients[1]])
    compiled.build(variables)
    servers.gather(compiled)
    servers.split(compiled)


def test_optimizers_that_servers_cannot_apply_are_refused():
    variables = make_variables()
    (shard,) = shard_variables(specs_of(variables), 1)
    with pytest.raises(ModelError, match=r"OddState has variables \S*of_all that"):
        VariableTable(OddState(0.1), shard, variables)
    with pytest.raises(ModelError, match="could not create its NoConfig: expected get_config"):
        VariableTable(NoConfig(3), shard, variables)
    with pytest.raises(ModelError, match="must be a Keras 3 optimizer, got str"):
        check_optimizer("adam", 1)
    with pytest.raises(ModelError, match=r"got 2 \(global_clipnorm=1.0\)"):
        check_optimizer(opt.LossScaleOptimizer(opt.SGD(global_clipnorm=1.0)), 2)
    check_optimizer(opt.SGD(global_clipnorm=1.0), 1)
    check_optimizer(OddState(0.1), 2)
    if hasattr(opt, "MultiOptimizer"):
        several = opt.MultiOptimizer(opt.OptimizerMap(opt.SGD()))
        with pytest.raises(ModelError, match="got MultiOptimizer, which has one for each"):
            check_optimizer(several, 1)


@pytest.mark.parametrize(
    ("optimizer", "whole"),
    [
        (opt.SGD(0.1), set()),
        (opt.LossScaleOptimizer(opt.Lion(0.1)), set()),
        (opt.Adam(0.1, clipvalue=1.0), set()),
        (opt.Adam(0.1, clipnorm=1.0), {0, 1, 2, 3}),
        (opt.Lamb(0.1), {0, 1, 2, 3}),
        (KeepsGradient(0.1), {0, 1, 2, 3}),
    ],
)
def test_unsplittable_variables(optimizer, whole):
    assert unsplittable_variables(optimizer, make_variables()) == whole


def test_the_layout_of_a_state_is_the_same_on_workers_and_servers():
    """The state is sent as bytes.

    In this test, a shard's first variable has a different dtype from the model's first variable.
    """
    variables = make_variables()
    variables[3] = keras.Variable(np.zeros(200), name="scale", dtype="float16")
    for optimizer in (opt.Nadam(0.01), opt.Adam(0.01, gradient_accumulation_steps=2)):
        servers = Servers(optimizer, variables, 3)
        optimizer.build(variables)
        for shard, table in zip(servers.shards, servers.tables):
            of_server, of_worker = table.state(), split_state(optimizer, shard)
            assert [(k, a.dtype, a.shape) for k, a in of_server.items()] == [
                (k, a.dtype, a.shape) for k, a in of_worker.items()
            ]


def test_servers_apply_the_mean_of_accumulated_gradients():
    """Schedules and ``iterations`` count the workers' steps, as Keras does."""
    steps = 3
    variables, others = make_variables(), make_variables()
    expected = opt.Adam(RATES, gradient_accumulation_steps=steps)
    expected.build(variables)
    compiled = opt.Adam(RATES, gradient_accumulation_steps=steps)
    servers = Servers(compiled, others, 2)
    for update in range(4):
        parts = [make_gradients(steps * update + n, variables) for n in range(steps)]
        for part in parts:
            expected.apply(part)
        servers.apply([np.mean(of_one, axis=0, dtype="float32") for of_one in zip(*parts)])
    assert_close(servers.weights(), [v.value for v in variables], rtol=1e-5)
    compiled.build(others)
    servers.gather(compiled)
    assert int(compiled._iterations.numpy()) == 12
    resumed = Servers(compiled, others, 3)
    resumed.split(compiled)
    assert [int(table.state()["iterations"]) for table in resumed.tables] == [4, 4, 4]


def test_optimizer_variables_do_not_keep_the_memory_of_a_buffer():
    variable = keras.Variable(np.zeros((64, 64), "float32"), name="kernel")
    (shard,) = shard_variables(specs_of([variable]), 1)
    raw = np.zeros(shard.nbytes + 64, np.uint8)
    buffer = raw[-raw.ctypes.data % 64 :][: shard.nbytes]
    table = VariableTable(KeepsGradient(0.1), shard, [variable])
    shard.pack([np.full((64, 64), 3, "float32")], buffer)
    table.apply(flat_gradients(table, buffer))
    buffer.fill(0)
    assert (table.state()["last/0000/0"] == 3).all()


def test_the_models_optimizer_must_be_built():
    variables = make_variables()
    optimizer = opt.Adam(0.1)
    with pytest.raises(ModelError, match=r"is not built; call optimizer\.build"):
        Servers(optimizer, variables, 2).gather(optimizer)


def test_the_learning_rate_of_the_models_optimizer_is_kept():
    variables = make_variables()
    optimizer = opt.Adam(0.1)
    servers = Servers(optimizer, variables, 2)
    optimizer.build(variables)
    optimizer.learning_rate = 0.5
    servers.gather(optimizer)
    assert float(optimizer.learning_rate) == 0.5
