"""What shards make of an optimizer: copies, rules that need whole variables, refusals."""

import keras
import numpy as np
import pytest

from hvdtrain.errors import ModelError
from hvdtrain.parameter_server.shard_optimizer import check_optimizer, stays_whole
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.parameter_server.variable_table import VariableTable
from tests.parameter_server.tables import (
    KeepsGradient,
    NoConfig,
    OddState,
    Servers,
    assert_close,
    make_gradients,
    make_variables,
)

opt = keras.optimizers


def test_paths_are_those_of_the_model():
    variables = make_variables()
    for shard in shard_variables(specs_of(variables), 2):
        table = VariableTable(opt.SGD(0.1), shard, variables)
        paths = [v.path for v in table._variables]
        assert paths == [variables[piece.variable].path for piece in shard.pieces]


def test_constraints_see_whole_variables():
    variables, others = [make_variables(constraint=keras.constraints.MaxNorm(0.5)) for _ in "ab"]
    expected = opt.SGD(0.1)
    optimizer = opt.SGD(0.1)
    assert stays_whole(optimizer, others) == {0}
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


def test_variables_that_their_gradients_overwrite():
    """float8 scales."""
    variables = make_variables()
    variables[1].overwrite_with_gradient = True
    servers = Servers(compiled := opt.Adam(0.1), variables, 2)
    gradients = make_gradients(0, variables)
    servers.apply(gradients)
    assert_close([servers.weights()[1]], [gradients[1]])
    compiled.build(variables)
    servers.gather(compiled)
    servers.cut(compiled)


def test_optimizers_that_can_not_be_shared_out():
    variables = make_variables()
    (shard,) = shard_variables(specs_of(variables), 1)
    with pytest.raises(ModelError, match=r"Can't tell .*of_all of OddState belong"):
        VariableTable(OddState(0.1), shard, variables)
    with pytest.raises(ModelError, match="NoConfig of its own: expected get_config"):
        VariableTable(NoConfig(3), shard, variables)
    with pytest.raises(ModelError, match="Expected a Keras 3 optimizer, received str"):
        check_optimizer("adam", 1)
    with pytest.raises(ModelError, match=r"global_clipnorm=1.0 and 2 parameter servers"):
        check_optimizer(opt.LossScaleOptimizer(opt.SGD(global_clipnorm=1.0)), 2)
    check_optimizer(opt.SGD(global_clipnorm=1.0), 1)
    check_optimizer(OddState(0.1), 2)
    if hasattr(opt, "MultiOptimizer"):
        several = opt.MultiOptimizer(opt.OptimizerMap(opt.SGD()))
        with pytest.raises(ModelError, match="MultiOptimizer, which has an optimizer for each"):
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
def test_what_must_not_be_cut(optimizer, whole):
    assert stays_whole(optimizer, make_variables()) == whole
