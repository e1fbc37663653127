import gc
import weakref

import keras
import numpy as np
import pytest

from hvdtrain.parameter_server.gradients import take_rows
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.parameter_server.variable_table import VariableTable
from tests.parameter_server.tables import (
    OPTIMIZERS,
    RATES,
    Plain,
    Servers,
    assert_close,
    flat_gradients,
    make_gradients,
    make_variables,
    plain,
)

opt = keras.optimizers


QUICK = ("SGD", "Adam EMA")
SLOW = ("SGD nesterov", "Adafactor")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in QUICK else pytest.mark.slow if name in SLOW else pytest.mark.more,
        )
        for name in OPTIMIZERS
    ],
)
def test_sharded_updates_equal_those_of_the_optimizer(name):
    """They are equal before and after the state is moved to the optimizer and to fewer servers."""
    variables = make_variables()
    expected = plain(OPTIMIZERS[name](variables))
    whole = Plain(expected, variables)

    others = make_variables()
    compiled = OPTIMIZERS[name](others)
    servers = Servers(compiled, others, 3)
    for step in range(3):
        whole.apply(*make_gradients(step, variables))
        servers.apply(make_gradients(step, variables))
    assert_close(servers.weights(), [v.value for v in variables])
    assert not plain(compiled).built

    compiled.build(others)
    servers.gather(compiled)
    assert_close(plain(compiled).variables, expected.variables)
    for variable, value in zip(others, servers.weights()):
        variable.assign(value)
    servers = Servers(compiled, others, 2)
    servers.split(compiled)
    for step in range(3, 6):
        whole.apply(*make_gradients(step, variables))
        servers.apply(make_gradients(step, variables))
    assert_close(servers.weights(), [v.value for v in variables])
    assert [int(table.state()["iterations"]) for table in servers.tables] == [6, 6]
    servers.gather(compiled)
    assert_close(plain(compiled).variables, expected.variables)


def test_the_learning_rate_can_be_read_and_set():
    variables = make_variables()
    optimizer = opt.SGD(0.5)
    optimizer.learning_rate = 0.25
    (shard,) = shard_variables(specs_of(variables), 1)
    table = VariableTable(optimizer, shard, variables)
    assert table.learning_rate == 0.25
    table.learning_rate = 0.125
    assert table.learning_rate == 0.125
    assert float(optimizer.learning_rate) == 0.25
    gradients = Servers.packed(shard, [np.ones(v.shape, "float32") for v in variables])
    table.apply(flat_gradients(table, gradients))
    buffer = np.zeros(shard.nbytes, np.uint8)
    table.weights(buffer)
    assert {float(n) for view in shard.views(buffer) for n in view.flat} == {-0.125}
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        VariableTable(opt.SGD(RATES), shard, variables).learning_rate = 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("Adafactor", "Lamb", "Muon")])
def test_sparse_updates_equal_dense_ones(name):
    """Gradients have any number of rows, and some rows are repeated."""
    variables = make_variables()
    whole = Plain(plain(OPTIMIZERS[name](variables)), variables)
    others = make_variables()
    servers = Servers(OPTIMIZERS[name](others), others, 2)
    table_spec = specs_of(variables)[2]
    for step, count in enumerate([5, 0, 17, 3]):
        rng = np.random.default_rng(step)
        indices = rng.integers(0, 40, count)
        values = rng.normal(size=(count, 2)).astype("float32")
        gradients = make_gradients(step, variables)
        gradients[2] = np.zeros((40, 2), "float32")
        np.add.at(gradients[2], indices, values)
        whole.apply(*gradients)
        gradients[2] = np.full((40, 2), np.nan, "float32")
        for shard, table in zip(servers.shards, servers.tables):
            rows = {
                number: take_rows(piece, table_spec, indices, values)
                for number, piece in enumerate(shard.pieces)
                if piece.variable == 2
            }
            flat = servers.packed(shard, gradients)
            table.apply(flat_gradients(table, flat, rows=rows))
    assert_close(servers.weights(), [v.value for v in variables], rtol=1e-5)


def test_sparse_updates_are_not_made_dense():
    variables = make_variables()
    (shard,) = shard_variables(specs_of(variables), 1)
    table = VariableTable(opt.SGD(1.0), shard, variables)
    rows = {2: (np.array([3, 3]), np.ones((2, 2), "float32"))}
    table.apply(flat_gradients(table, np.zeros(shard.nbytes, np.uint8), rows=rows))
    step = table._steps[frozenset({2}), frozenset()]
    operations = {operation.type for operation in step.graph.get_operations()}
    assert "ResourceScatterSub" in operations
    buffer = np.zeros(shard.nbytes, np.uint8)
    table.weights(buffer)
    changed = np.flatnonzero(shard.views(buffer)[2].any(axis=1))
    assert changed.tolist() == [3]
    assert shard.views(buffer)[2][3].tolist() == [-2, -2]


def test_steps_are_traced_once():
    variables = make_variables()
    (shard,) = shard_variables(specs_of(variables), 1)
    table = VariableTable(opt.Adam(0.1), shard, variables)
    for step in range(4):
        gradients = Servers.packed(shard, make_gradients(step, variables))
        table.apply(flat_gradients(table, gradients))
        rows = (np.arange(step), np.ones((step, 2), "float32"))
        table.apply(flat_gradients(table, gradients, rows={2: rows}))
        table.load(gradients)
    assert len(table._steps) == 2


def test_variables_without_gradients_do_not_change():
    variables = make_variables()
    expected = opt.AdamW(0.01, weight_decay=0.5)
    expected.build(variables)
    others = make_variables()
    servers = Servers(opt.AdamW(0.01, weight_decay=0.5), others, 1)
    for step in range(3):
        gradients = make_gradients(step, variables)
        gradients[1] = None
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            expected.apply(gradients)
        gradients[1] = np.zeros(6, "float32")
        servers.apply(gradients, missing=[1])
    assert_close(servers.weights(), [v.value for v in variables])
    servers.apply(make_gradients(9, variables), missing=range(4))
    assert_close(servers.weights(), [v.value for v in variables])
    assert servers.tables[0].state()["iterations"] == 4


def test_variables_do_not_keep_the_memory_of_a_buffer():
    """The buffer is aligned, unaligned or read-only."""
    variables = make_variables()
    (shard,) = shard_variables(specs_of(variables), 1)
    raw = np.zeros(shard.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64
    for skip in (0, 4):
        buffer = raw[start + skip : start + skip + shard.nbytes]
        table = VariableTable(opt.SGD(1.0), shard, variables)
        shard.pack([np.full(v.shape, 3, "float32") for v in variables], buffer)
        table.load(buffer)
        shard.pack([np.full(v.shape, 1, "float32") for v in variables], buffer)
        buffer.flags.writeable = False
        table.apply(flat_gradients(table, buffer))
        buffer.flags.writeable = True
        shard.pack([np.full(v.shape, 7, "float32") for v in variables], buffer)
        weights = np.zeros(shard.nbytes, np.uint8)
        table.weights(weights)
        assert {float(n) for view in shard.views(weights) for n in view.flat} == {2.0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype):
    variables, others = make_variables(dtype), make_variables(dtype)
    expected = opt.SGD(0.1, momentum=0.5)
    servers = Servers(opt.SGD(0.1, momentum=0.5), others, 3)
    for step in range(3):
        expected.apply(make_gradients(step, variables), variables)
        servers.apply(make_gradients(step, variables))
    # Keras applies the same operations in a different order, which matters in half precision.
    assert_close(servers.weights(), [v.value for v in variables], rtol=1e-2)
    assert {np.dtype(w.dtype).name for w in servers.weights()} == {dtype}


def test_tables_are_garbage_collected():
    """Each ``fit`` creates a table, so TensorFlow and Keras must not keep references to it."""
    variables = make_variables()
    (shard,) = shard_variables(specs_of(variables), 1)
    table = VariableTable(opt.Adam(0.1), shard, variables)
    table.apply(flat_gradients(table, np.zeros(shard.nbytes, np.uint8)))
    table.weights(np.empty(shard.nbytes, np.uint8))
    (step,) = table._steps.values()
    references = [weakref.ref(x) for x in (table, step.graph, table._variables[0].value)]
    del table, step
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
