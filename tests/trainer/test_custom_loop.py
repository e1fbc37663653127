"""Custom training loops with ``hvdtrain.DistributedOptimizer`` on each backend of Keras."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from hvdtrain import frameworks
from hvdtrain import world as job
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import MismatchError, ModelError, NonFiniteError
from hvdtrain.trainer.optimizer_mixins import Weighting
from hvdtrain.trainer.optimizer_patch import track_weights, weighting

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.backends("tensorflow", "torch", "jax"),
]
SHAPES = [(30, 20), (20,), ()]
optimizers = keras.optimizers


class Loop:
    """Trains variables towards targets. The gradient of each is its distance from the target.

    By default, steps run as users of the framework write them first: eagerly, but compiled and
    without side effects with JAX. ``other_way`` compiles what is eager otherwise, and vice versa.
    """

    def __init__(self, optimizer: Any, dtype: str = "float32", *, other_way: bool = False) -> None:
        keras.utils.set_random_seed(1)
        self.optimizer = optimizer
        starts = np.random.default_rng(0)
        self.variables = [
            keras.Variable(starts.normal(size=shape), dtype=dtype, name=f"v{n}")
            for n, shape in enumerate(SHAPES)
        ]
        optimizer.build(self.variables)
        self._step: Callable[..., Any] | None = None
        self._pure = keras.backend.backend() == "jax" and not other_way
        self._apply = _compiled(self._apply_now) if other_way else self._apply_now

    def step(self, target: Any, missing: Sequence[int] = ()) -> None:
        target = ops.convert_to_tensor(target, "float32")
        if self._pure:
            self._step_of_jax(target, missing)
        else:
            self._apply(target, missing)

    def _apply_now(self, target: Any, missing: Sequence[int]) -> None:
        self.optimizer.apply(self._gradients(self.variables, target, missing), self.variables)

    def _gradients(self, values: Sequence[Any], target: Any, missing: Sequence[int]) -> list[Any]:
        scale = getattr(self.optimizer, "dynamic_scale", 1.0)
        return [
            None if n in missing else ops.cast((value - ops.cast(target, value.dtype)), value.dtype)
            * ops.cast(scale, value.dtype)
            for n, value in enumerate(values)
        ]  # fmt: skip

    def _step_of_jax(self, target: Any, missing: Sequence[int]) -> None:
        import jax

        def compute(values: Any, state: Any, target: Any) -> Any:
            with keras.StatelessScope(list(zip(self.optimizer.variables, state))):
                gradients = self._gradients(values, target, missing)
            return self.optimizer.stateless_apply(state, gradients, values)

        step = self._step = self._step or jax.jit(compute)
        state = [variable.value for variable in self.optimizer.variables]
        results = step([variable.value for variable in self.variables], state, target)
        values, state = jax.block_until_ready(results)  # raises the errors of the step
        for variable, value in zip([*self.variables, *self.optimizer.variables], [*values, *state]):
            variable.assign(value)

    def values(self) -> list[np.ndarray]:
        return [ops.convert_to_numpy(ops.cast(v, "float32")).copy() for v in self.variables]


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, autograph=False)
    if keras.backend.backend() == "torch":
        import torch

        return torch.compile(function, backend="eager")  # which needs no C++ compiler
    return function


TARGETS = [(1.0, 3.0), (0.0, -6.0), (2.0, 2.5), (4.0, 0.0), (1.0, -1.0), (0.5, 8.0)]


def train(make: Callable[[], Any], *, distributed: bool, **options: Any) -> Loop:
    """Train on all ranks, or on one with the mean of the ranks' targets."""
    optimizer = make()
    if distributed:
        import hvdtrain

        assert hvdtrain.DistributedOptimizer(optimizer) is optimizer
    loop = Loop(optimizer, **options)
    for targets in TARGETS:
        loop.step(targets[job.rank()] if distributed else np.mean(targets))
    return loop


def equal_on_ranks(loop: Loop) -> bool:
    engine = job.collectives()
    values = np.concatenate([value.ravel() for value in loop.values()])
    return bool((engine.allgather(values[np.newaxis]) == values).all())


MAKES: dict[str, Callable[[], Any]] = {
    # Adam divides tiny gradients by their size, so that rounding would show.
    "Adam": lambda: optimizers.Adam(0.1, epsilon=0.01),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "accumulation": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "clipping": lambda: optimizers.SGD(0.1, global_clipnorm=5.0, gradient_accumulation_steps=3),
    "decay": lambda: optimizers.AdamW(0.1, epsilon=0.01, weight_decay=0.1, loss_scale_factor=1.0),
    "loss scaling": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=8.0),
    "scaling and accumulation": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.1, epsilon=0.01, gradient_accumulation_steps=2), dynamic_growth_steps=2
    ),
}


@pytest.mark.parametrize("name", MAKES)
def test_ranks_train_like_one_process(world: Any, name: str) -> None:
    loop = train(MAKES[name], distributed=True)
    expected = train(MAKES[name], distributed=False)
    for value, other, start in zip(loop.values(), expected.values(), Loop(MAKES[name]()).values()):
        np.testing.assert_allclose(value, other, atol=1e-5)
        assert np.abs(value - start).max() > 0.01
    assert equal_on_ranks(loop)


def test_compiled_and_eager_steps(world: Any) -> None:
    loop = train(MAKES["accumulation"], distributed=True, other_way=True)
    expected = train(MAKES["accumulation"], distributed=False)
    for value, other in zip(loop.values(), expected.values()):
        np.testing.assert_allclose(value, other, atol=1e-5)


@pytest.mark.parametrize("name", ["accumulation", "scaling and accumulation"])
def test_accumulated_steps_need_one_reduction(world: Any, name: str, monkeypatch: Any) -> None:
    names = []
    reduce = Engine.grouped_allreduce

    def spy(self: Any, arrays: Any, *args: Any, name: str = "", **options: Any) -> Any:
        names.extend([name] if name == "gradients" else [])
        return reduce(self, arrays, *args, name=name, **options)

    monkeypatch.setattr(Engine, "grouped_allreduce", spy)
    train(MAKES[name], distributed=True).values()
    assert names == ["gradients"] * (len(TARGETS) // 2)


def test_an_overflow_on_one_rank_skips_the_step_on_all(world: Any) -> None:
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=8.0)
    loop = Loop(world.DistributedOptimizer(optimizer))
    before = loop.values()
    loop.step(np.inf if job.rank() == 1 else 1.0)
    for value, other in zip(loop.values(), before):
        np.testing.assert_array_equal(value, other)
    assert float(optimizer.dynamic_scale.numpy()) == 4.0
    loop.step(1.0)
    assert (loop.values()[0] != before[0]).all()


def test_half_precision(world: Any) -> None:
    make = lambda: optimizers.SGD(0.125)  # noqa: E731
    loop = train(make, distributed=True, dtype="bfloat16")
    expected = train(make, distributed=False, dtype="bfloat16")
    assert equal_on_ranks(loop)
    np.testing.assert_allclose(loop.values()[0], expected.values()[0], atol=0.1)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that changes settings of the job, in which each rank counts as a host."""

    def change(**values: Any) -> None:
        changed = dataclasses.replace(job.settings(), **values)
        entered = dataclasses.replace(job._world, settings=changed, hosts=(0, 1))
        monkeypatch.setattr(job, "_world", entered)

    return change


@pytest.mark.parametrize("accumulates", [False, True])
def test_compressed_gradients(world: Any, settings: Any, accumulates: bool) -> None:
    settings(compression="powersgd:1")
    steps = 2 if accumulates else None
    make = lambda: optimizers.SGD(0.03, gradient_accumulation_steps=steps)  # noqa: E731
    loop = train(make, distributed=True)
    expected = train(make, distributed=False)
    assert equal_on_ranks(loop)
    kept = loop.optimizer._hvdtrain_reducer.feedback.arrays(loop.variables)
    assert np.abs(kept["unsent/0000"].value).max() > 0  # a matrix of rank 1 can't hold all
    for value, other in zip(loop.values()[1:], expected.values()[1:]):
        np.testing.assert_allclose(value, other, atol=1e-5)
    for targets in TARGETS * 30:  # the unsent parts follow
        loop.step(targets[job.rank()])
        expected.step(np.mean(targets))
    assert np.abs(loop.values()[0] - expected.values()[0]).mean() < 0.15


def test_values_that_are_not_finite(world: Any, settings: Any) -> None:
    errors = (NonFiniteError, *frameworks.of_keras().ERRORS)
    loop = Loop(world.DistributedOptimizer(optimizers.SGD(0.1)))
    before = loop.values()
    target = np.nan if job.rank() == 1 else 1.0
    with pytest.raises(errors, match=r"A gradient is not finite: v0 \(NaN\), v1 .*on rank 1"):
        loop.step(target)
    for value, other in zip(loop.values(), before):
        np.testing.assert_array_equal(value, other)
    loop.step(1.0)
    assert np.isfinite(loop.values()[0]).all()
    settings(non_finite="ignore")
    loop = Loop(world.DistributedOptimizer(optimizers.SGD(0.1)))
    loop.step(target)
    assert np.isnan(loop.values()[0]).all()


def test_a_gradient_that_only_some_ranks_miss(world: Any) -> None:
    errors = (MismatchError, *frameworks.of_keras().ERRORS)
    loop = Loop(world.DistributedOptimizer(optimizers.SGD(0.1)))
    before = loop.values()
    loop.step(5.0, missing=[1])
    assert (loop.values()[1] == before[1]).all()
    assert (loop.values()[0] != before[0]).all()
    other = Loop(world.DistributedOptimizer(optimizers.SGD(0.1)))
    with pytest.raises(errors, match=r"v1 is dense float32 \(20,\) on rank 0 and None on rank 1"):
        other.step(5.0, missing=[1] if job.rank() == 1 else [])


def test_weights_of_accumulated_steps(world: Any) -> None:
    # The mean weight of both ranks and steps is 2, so the averages are divided by 2.
    optimizer = world.DistributedOptimizer(optimizers.SGD(1.0, gradient_accumulation_steps=2))
    track_weights(optimizer, "float32")
    loop = Loop(optimizer)
    before = loop.values()
    for _ in range(2):  # the second update starts with a weight of zero
        for weight in (1.0, 3.0):
            loop._step = None  # a new weight is a new program
            with weighting([optimizer], Weighting(weight=np.float32(weight)), jit=False):
                loop.step(7.0)
    for value, start in zip(loop.values(), before):
        np.testing.assert_allclose(value, start + 0.75 * (7.0 - start), rtol=1e-5)


def test_initial_values_are_those_of_the_chief(world: Any) -> None:
    variables = [
        keras.Variable(np.full((2, 3), job.rank() + 1.0)),
        keras.Variable(job.rank(), trainable=False),
    ]
    world.broadcast_variables(variables)
    assert (variables[0].numpy() == 1.0).all()
    assert int(variables[1].numpy()) == 0


def test_wrong_uses(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="Expected a Keras 3 optimizer, got object"):
        world.DistributedOptimizer(object())
    with pytest.raises(ModelError, match="got no variables"):
        world.broadcast_variables([])
    other = dataclasses.replace(job._world, framework="cntk")
    monkeypatch.setattr(job, "_world", other)
    with pytest.raises(ModelError, match=r"prepared devices for cntk, but the Keras backend is"):
        world.DistributedOptimizer(optimizers.SGD())
