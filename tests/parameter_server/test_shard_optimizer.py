import keras
import numpy as np
import pytest

from hvdtrain.errors import ModelError
from hvdtrain.parameter_server.shard_optimizer import check_optimizer, unsplittable_variables
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
