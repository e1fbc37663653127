"""The order in which a session runs collectives: the order of their creation.

A session runs the fetched operations and their inputs, each as soon as possible. All ranks must run
the same collectives in the same order, so control dependencies chain the collectives. But if a
collective is not needed for the fetches, it must not run: it may need data that is not fed, or
consume a batch. The chain therefore has gates at which it can be cut::

    gate 0 ──> operation 1 ──> done 1 ──> gate 1 ──> operation 2 ──> done 2 ──> gate 2 ...
       └───────────────────────────────────^ └───────────────────────────────────^

In this picture, an operation depends on the previous gate. The next gate depends on the previous
gate and on the tensor ``done``, which depends on the operation. If a run does not need the
operation, it feeds a value for ``done``. TensorFlow then doesn't run the operation and its inputs.

In TensorFlow 1 control flow (``disable_control_flow_v2``), some control dependencies can't enter or
leave a ``cond`` or ``while_loop``. If an operation is in a branch of a ``cond`` and the other
branch is taken, the operation is treated as done. A ``while_loop`` is treated as one operation of
the graph around it. The operations in its body have a separate order, and iterations run one at a
time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.frameworks.tensorflow.graph_order import calls_between_ranks
from hvdtrain.private_api import tensorflow as private_tensorflow

__all__ = ["SessionOrder"]

_SCOPE = "order_between_ranks"
_ATTRIBUTE = "_hvdtrain_order"


class _Link(NamedTuple):
    """A collective in the chain of a graph, or the first input of a loop that contains collectives.

    ``done`` is a tensor that depends on the operation. ``gate`` is the gate after the operation.
    """

    operation: tf.Operation
    done: tf.Tensor
    gate: tf.Tensor


class SessionOrder:
    """The order in which sessions run the collectives of a graph."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._lock = threading.Lock()
        self._operation_count = 0
        self._version = -1
        self._links: list[_Link] = []
        self._gates: set[tf.Operation] = set()
        self._loops: dict[Any, list[tf.Operation]] = {}  # the latest operations of each loop
        self._loop_names: set[str] = set()
        self._skipped: dict[Any, list[tf.Tensor]] = {}

    @classmethod
    def of(cls, graph: Any) -> SessionOrder:
        """Return the ``SessionOrder`` of a graph, which is stored as an attribute of the graph."""
        order = getattr(graph, _ATTRIBUTE, None)
        if order is None:
            order = cls(graph)
            setattr(graph, _ATTRIBUTE, order)
        return order

    def extend(self) -> None:
        """Add new collectives of the graph to the chain, before a session reads the graph."""
        if self._graph.version == self._version:
            return
        with self._lock:
            added = [
                op
                for op in self._graph.get_operations()[self._operation_count :]
                if calls_between_ranks(op)
            ]
            if added:
                finalized = self._graph.finalized
                private_tensorflow.unfinalize(self._graph)
                with self._graph.as_default(), tf.control_dependencies(None), tf.device("CPU:0"):
                    for operation in added:
                        self._add(operation)
                if finalized:
                    self._graph.finalize()
            operations = self._graph.get_operations()
            # Gradients that are added later may add inputs to loops.
            self._run_iterations_serially(operations[self._operation_count :])
            self._operation_count = len(operations)
            self._version = self._graph.version

    def feeds_to_skip(
        self, targets: Sequence[Any], fetches: Sequence[Any], feeds: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        """Return additional feeds, with which a run skips the collectives that it does not need.

        Args:
            targets: Operations to run.
            fetches: Tensors to return.
            feeds: Feeds of the caller, with tensor references as keys.
        """
        if not self._links:
            return {}
        fed = {reference.deref().name for reference in feeds}
        key = (
            tuple(op.name for op in targets),
            tuple(tensor.name for tensor in fetches),
            frozenset(fed),
        )
        if key not in self._skipped:
            self._skipped[key] = self._tensors_to_skip(targets, fetches, fed)
        return {tensor.ref(): np.array(True) for tensor in self._skipped[key]}

    def _tensors_to_skip(
        self, targets: Iterable[Any], fetches: Iterable[Any], fed: set[str]
    ) -> list[tf.Tensor]:
        roots = [*targets, *(tensor.op for tensor in fetches if tensor.name not in fed)]
        needed = _needed_operations(roots, fed, self._gates)
        positions = [n for n, link in enumerate(self._links) if link.operation in needed]
        if not positions:
            return []
        first, last = positions[0], positions[-1]
        skipped = [n.done for n in self._links[first:last] if n.operation not in needed]
        # Feeding one gate skips everything before it.
        return [self._links[first - 1].gate, *skipped] if first else skipped

    def _add(self, operation: tf.Operation) -> None:
        """Add an operation to the chain.

        If the operation is inside a loop, add it to the order of the loop, and add the loop to the
        chain.
        """
        first, last = [operation], [operation]
        context = private_tensorflow.control_flow_context(operation)
        while True:
            branches, loop = _branches_and_loop(context)
            if loop is None:
                self._add_link(first, last, branches)
                return
            is_known = loop in self._loops
            _run_after(first, self._loops.get(loop, []))
            self._loops[loop] = [_after(last, branches)] if branches else last
            if is_known:
                return
            first = [tensor.op for tensor in loop.loop_enters]
            last = [tensor.op for tensor in loop.loop_exits]
            self._loop_names.update(enter.get_attr("frame_name").decode() for enter in first)
            context = loop.outer_context

    def _run_iterations_serially(self, operations: Iterable[tf.Operation]) -> None:
        if not self._loop_names:
            return
        for operation in operations:
            is_enter = operation.type in ("Enter", "RefEnter")
            if is_enter and operation.get_attr("frame_name").decode() in self._loop_names:
                private_tensorflow.run_iterations_serially(operation)

    def _add_link(
        self, first: list[tf.Operation], last: list[tf.Operation], branches: list[Any]
    ) -> None:
        with tf.name_scope(_SCOPE):
            # TensorFlow's optimizer removes a control dependency if there is also a longer path,
            # even if a feed cuts that path. It also turns unused inputs into control dependencies.
            # So gates are linked by data, and an operation depends on an assertion of its gate.
            done = tf.compat.v1.placeholder_with_default(_after(last, branches).outputs[0], [])
            gate = done
            for link in self._links[-1:]:
                _run_after(first, [tf.raw_ops.Assert(condition=link.gate, data=[link.gate])])
                gate = tf.logical_and(link.gate, done)
        self._gates.add(gate.op)
        self._links.append(_Link(first[0], done, gate))


def _branches_and_loop(context: Any) -> tuple[list[Any], Any]:
    """Return the branches of ``cond`` that contain a context, and the innermost loop around it.

    Only branches inside this loop are returned, with the innermost branch first. The loop is None
    if the context is not inside a loop.
    """
    branches = []
    while context is not None and not context.IsWhileContext():
        if context.IsCondContext():
            branches.append(context)
        context = context.outer_context
    return branches, context


def _run_after(operations: Iterable[tf.Operation], before: Iterable[tf.Operation]) -> None:
    for operation, earlier in itertools.product(operations, before):
        private_tensorflow.add_control_input(operation, earlier)


def _after(operations: list[tf.Operation], branches: list[Any]) -> tf.Operation:
    """Add an operation that runs after ``operations``, but is outside of their branches.

    If ``operations`` don't run because ``cond`` takes the other branch, the new operation still
    runs.
    """
    if not branches:
        after = tf.constant(True).op
        _run_after([after], operations)
    for context in branches:
        operations = [after] = [_after_branch(operations, context)]
    return after


def _after_branch(operations: list[tf.Operation], context: Any) -> tf.Operation:
    with private_tensorflow.in_control_flow_context(operations[0].graph, context.outer_context):
        sides = tf.raw_ops.Switch(data=tf.constant(True), pred=context.pred)
        taken = tf.identity(sides[context.branch]).op
        _run_after([taken], operations)
        other = sides[1 - context.branch]
        merged = tf.raw_ops.Merge(inputs=[taken.outputs[0], other])
        return merged.output.op


def _needed_operations(
    roots: Iterable[tf.Operation], fed: set[str], gates: set[tf.Operation]
) -> set[tf.Operation]:
    """Return ``roots`` and all operations on which they depend, up to gates."""
    needed: set[tf.Operation] = set()
    pending = list(roots)
    while pending:
        operation = pending.pop()
        if operation in needed or operation in gates:
            continue
        needed.add(operation)
        pending += (tensor.op for tensor in operation.inputs if tensor.name not in fed)
        pending += operation.control_inputs
    return needed
