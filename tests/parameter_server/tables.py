"""Variable tables of several servers in one process, and an optimizer to compare them with."""

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.fusion import join_bytes
from hvdtrain.parameter_server.gradients import ShardGradients
from hvdtrain.parameter_server.shard_optimizer import (
    split_state,
    unpack_states,
    unsplittable_variables,
)
from hvdtrain.parameter_server.sharding import assemble, shard_variables, specs_of
from hvdtrain.parameter_server.variable_table import VariableTable

opt = keras.optimizers
SHAPES = {"dense/kernel": (7, 6), "dense/bias": (6,), "embedding/table": (40, 2), "norm/scale": ()}
RATES = opt.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)


def make_variables(dtype="float32", constraint=None):
    rng = np.random.default_rng(5)
    variables = []
    for path, shape in SHAPES.items():
        scope, name = path.split("/")
        with keras.name_scope(scope):
            value = rng.normal(size=shape).astype("float32")
            variables.append(keras.Variable(value, name=name, dtype=dtype))
    variables[0].constraint = constraint
    return variables


def make_gradients(step, variables):
    rng = np.random.default_rng(step)
    return [rng.normal(size=v.shape).astype(tf.as_dtype(v.dtype).as_numpy_dtype) for v in variables]


def flat_gradients(table, flat, **options):
    return ShardGradients(shard=table.shard, flat=flat, **options)


class Servers:
    def __init__(self, optimizer, variables, count):
        specs = specs_of(variables)
        self.optimizer = optimizer
        self.variables = variables
        self.shards = shard_variables(specs, count, unsplittable_variables(optimizer, variables))
        self.tables = [VariableTable(optimizer, shard, variables) for shard in self.shards]
        values = [np.array(v.value) for v in variables]
        for shard, table in zip(self.shards, self.tables):
            table.load(self.packed(shard, values))

    @staticmethod
    def packed(shard, arrays):
        buffer = np.zeros(shard.nbytes, np.uint8)
        shard.pack(arrays, buffer)
        return buffer

    def apply(self, gradients, **options):
        for shard, table in zip(self.shards, self.tables):
            table.apply(flat_gradients(table, self.packed(shard, gradients), **options))

    def weights(self):
        buffers = [np.zeros(shard.nbytes, np.uint8) for shard in self.shards]
        for table, buffer in zip(self.tables, buffers):
            table.weights(buffer)
        return assemble(specs_of(self.variables), self.shards, buffers)

    def gather(self, optimizer):
        states = [join_bytes(table.state()) for table in self.tables]
        unpack_states(optimizer, self.shards, states)

    def split(self, optimizer):
        for shard, table in zip(self.shards, self.tables):
            table.load_state(split_state(optimizer, shard))


def decayed(variables, optimizer):
    optimizer.exclude_from_weight_decay(var_list=[variables[2]], var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "SGD": lambda v: opt.SGD(0.1),
    "SGD nesterov": lambda v: opt.SGD(0.1, momentum=0.9, nesterov=True),
    "SGD with a schedule": lambda v: opt.SGD(RATES, momentum=0.9),
    "SGD with a function": lambda v: opt.SGD(lambda: 0.03),
    "SGD clipvalue": lambda v: opt.SGD(0.1, clipvalue=0.5),
    "SGD clipnorm": lambda v: opt.SGD(0.1, clipnorm=0.5),
    "Adam amsgrad": lambda v: opt.Adam(0.01, amsgrad=True),
    "Adam with a schedule": lambda v: opt.Adam(RATES),
    "Adam EMA": lambda v: opt.Adam(0.01, use_ema=True, ema_overwrite_frequency=4),
    "AdamW exclusions": lambda v: decayed(v, opt.AdamW(0.01, weight_decay=0.5)),
    "SGD excluded by name": lambda v: decayed(v, opt.SGD(0.01, weight_decay=0.5)),
    "Adamax": lambda v: opt.Adamax(0.01),
    "Nadam": lambda v: opt.Nadam(0.01),
    "RMSprop centered": lambda v: opt.RMSprop(0.01, centered=True, momentum=0.5),
    "Adagrad": lambda v: opt.Adagrad(0.1),
    "Adadelta": lambda v: opt.Adadelta(1.0),
    "Ftrl": lambda v: opt.Ftrl(0.1, l1_regularization_strength=0.01, beta=0.1),
    "Lion": lambda v: opt.Lion(0.01, weight_decay=0.1),
    "LossScale": lambda v: opt.LossScaleOptimizer(opt.Adam(0.01)),
    "Adafactor": lambda v: opt.Adafactor(0.01),
    "Lamb": lambda v: opt.Lamb(0.01),
    "Muon": lambda v: opt.Muon(0.01),
}


class Plain:
    """An optimizer on whole variables, traced as in ``fit``."""

    def __init__(self, optimizer, variables):
        optimizer.build(variables)
        self.apply = tf.function(lambda *gradients: optimizer.apply(list(gradients)))


def plain(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def assert_close(actual, expected, rtol=1e-6):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.array(a, "float64"), np.array(b, "float64"), rtol, 1e-7)


class KeepsGradient(opt.SGD):
    """Assigns the gradient to a variable."""

    def build(self, variables):
        super().build(variables)
        self.last = self.add_optimizer_variables(variables, "last")

    def update_step(self, gradient, variable, learning_rate):
        self.assign(self.last[self._get_variable_index(variable)], gradient)


class OddState(opt.SGD):
    """Has a state that doesn't belong to a single variable."""

    def build(self, variables):
        super().build(variables)
        self.all = self.add_variable((3,), name="of_all")


class NoConfig(opt.SGD):
    """Can't be created from its configuration."""

    def __init__(self, needed, **options):
        super().__init__(**options)
