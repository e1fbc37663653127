import keras
import numpy as np
import pytest

from hvdtrain.errors import ModelError
from hvdtrain.parameter_server.optimizer_state import split_state
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.parameter_server.variable_table import VariableTable
from tests.parameter_server.tables import (
    RATES,
    KeepsGradient,
    Servers,
    assert_close,
    flat_gradients,
    make_gradients,
    make_variables,
)

opt = keras.optimizers


def test_the_layout_of_a_state_is_the_same_on_workers_and_servers():
    """It is sent as bytes. Here a shard's first variable has another dtype than the model's."""
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
