"""The order in which a session runs a graph's operations between ranks: as they were made.

A session runs what its caller fetches and what that needs, each as soon as it can. All ranks must
meet in the same operations in the same order, so these are chained; but what nobody fetches must
not run for that: it may need data that nobody feeds, and take a batch that then is lost. So the
chain can be cut::

    gate 0 ──> operation 1 ──> done 1 ──> gate 1 ──> operation 2 ──> done 2 ──> gate 2 ...
       └───────────────────────────────────^ └───────────────────────────────────^

An operation waits for the gate before it. The next gate waits for that gate and for ``done``, which
waits for the operation; where a run doesn't need the operation, ``done`` is fed, which leaves the
operation out, and all that it alone needs.

The control flow of TensorFlow 1 (``disable_control_flow_v2``) has contexts, over whose borders
control dependencies can't go in every way. What is in a branch of a ``cond`` counts as done when
the other branch was taken. A ``while_loop`` is one operation of the graph around it; within, its
operations have an order of their own, and one turn ends before the next begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.private_api import tensorflow as private_tensorflow
from hvdtrain.tensorflow.graph_order import calls_between_ranks

__all__ = ["SessionOrder"]

_SCOPE = "order_between_ranks"
_ATTRIBUTE = "_hvdtrain_order"


class _Link(NamedTuple):
    """An operation in the chain of a graph; for a loop, one of its inputs."""

    operation: tf.Operation
    done: tf.Tensor
    gate: tf.Tensor
    """The gate after the operation."""


class SessionOrder:
    """The chain of one graph.

    Args:
        graph: For sessions, not of a function.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._lock = threading.Lock()
        self._seen = 0
        self._version = -1
        self._links: list[_Link] = []
        self._borders: set[tf.Operation] = set()
        self._loops: dict[Any, list[tf.Operation]] = {}  # by context, the last ones within
        self._in_turns: set[str] = set()  # the names of these loops
        self._left_out: dict[Any, list[tf.Tensor]] = {}

    @classmethod
    def of(cls, graph: Any) -> SessionOrder:
        """Return the order of a graph, which is made once and kept with it."""
        order = getattr(graph, _ATTRIBUTE, None)
        if order is None:
            order = cls(graph)
            setattr(graph, _ATTRIBUTE, order)
        return order

    def extend(self) -> None:
        """Chain what was added to the graph; before a session takes note of it."""
        if self._graph.version == self._version:
            return
        with self._lock:
            added = [
                op for op in self._graph.get_operations()[self._seen :] if calls_between_ranks(op)
            ]
            if added:
                final = self._graph.finalized
                private_tensorflow.unfinalize(self._graph)
                with self._graph.as_default(), tf.control_dependencies(None), tf.device("CPU:0"):
                    for operation in added:
                        self._add(operation)
                if final:
                    self._graph.finalize()
            operations = self._graph.get_operations()
            # What loops take from around them, they may take because of a gradient that came later.
            self._run_turns_one_by_one(operations[self._seen :])
            self._seen = len(operations)
            self._version = self._graph.version

    def left_out(
        self, targets: Sequence[Any], fetches: Sequence[Any], feeds: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        """Return what to feed to a run, so that it does no operation but those that it needs.

        Args:
            targets: Operations that it is to run.
            fetches: Tensors that it is to return.
            feeds: What is fed already, by references to tensors.
        """
        if not self._links:
            return {}
        wanted = [op.name for op in targets], [tensor.name for tensor in fetches]
        fed = {reference.deref().name for reference in feeds}
        key = (*map(tuple, wanted), frozenset(fed))
        if key not in self._left_out:
            self._left_out[key] = self._cut(targets, fetches, fed)
        return {tensor.ref(): np.array(True) for tensor in self._left_out[key]}

    def _cut(
        self, targets: Iterable[Any], fetches: Iterable[Any], fed: set[str]
    ) -> list[tf.Tensor]:
        asked = [*targets, *(tensor.op for tensor in fetches if tensor.name not in fed)]
        needed = _needed(asked, fed, self._borders)
        places = [n for n, link in enumerate(self._links) if link.operation in needed]
        if not places:
            return []
        begin, end = places[0], places[-1]
        between = [n.done for n in self._links[begin:end] if n.operation not in needed]
        # One feed leaves out all that there is before the first.
        return [self._links[begin - 1].gate, *between] if begin else between

    def _add(self, operation: tf.Operation) -> None:
        """Chain an operation within its loop, and the loop within what is around that."""
        first, last = [operation], [operation]
        context = private_tensorflow.control_flow_context(operation)
        while True:
            branches, loop = _branches_and_loop(context)
            if loop is None:
                self._add_link(first, last, branches)
                return
            begun = loop in self._loops
            _run_after(first, self._loops.get(loop, []))
            self._loops[loop] = [_after(last, branches)] if branches else last
            if begun:
                return
            first = [tensor.op for tensor in loop.loop_enters]
            last = [tensor.op for tensor in loop.loop_exits]
            self._in_turns.update(enter.get_attr("frame_name").decode() for enter in first)
            context = loop.outer_context

    def _run_turns_one_by_one(self, operations: Iterable[tf.Operation]) -> None:
        if not self._in_turns:
            return
        for operation in operations:
            enters = operation.type in ("Enter", "RefEnter")
            if enters and operation.get_attr("frame_name").decode() in self._in_turns:
                private_tensorflow.run_turns_one_by_one(operation)

    def _add_link(
        self, first: list[tf.Operation], last: list[tf.Operation], branches: list[Any]
    ) -> None:
        with tf.name_scope(_SCOPE):
            # TensorFlow's optimizer takes a control dependency away where there is a longer way,
            # before it knows what is fed, and makes one of an input that is not used. So the way
            # from gate to gate is for data, and what an operation waits for is an assertion.
            done = tf.compat.v1.placeholder_with_default(_after(last, branches).outputs[0], [])
            gate = done
            for link in self._links[-1:]:
                _run_after(first, [tf.raw_ops.Assert(condition=link.gate, data=[link.gate])])
                gate = tf.logical_and(link.gate, done)
        self._borders.add(gate.op)
        self._links.append(_Link(first[0], done, gate))


def _branches_and_loop(context: Any) -> tuple[list[Any], Any]:
    """The contexts of branches around an operation from within, up to that of a loop, or None."""
    branches = []
    while context is not None and not context.IsWhileContext():
        if context.IsCondContext():
            branches.append(context)
        context = context.outer_context
    return branches, context


def _run_after(operations: Iterable[tf.Operation], before: Iterable[tf.Operation]) -> None:
    for operation in operations:
        for other in before:
            private_tensorflow.add_control_input(operation, other)


def _after(operations: list[tf.Operation], branches: list[Any]) -> tf.Operation:
    """An operation outside of these branches that runs after others, or where they don't run."""
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


def _needed(
    asked: Iterable[tf.Operation], fed: set[str], borders: set[tf.Operation]
) -> set[tf.Operation]:
    """Return all operations that some need in order to run, these too; none beyond the borders."""
    found: set[tf.Operation] = set()
    ahead = list(asked)
    while ahead:
        operation = ahead.pop()
        if operation in found or operation in borders:
            continue
        found.add(operation)
        ahead += (tensor.op for tensor in operation.inputs if tensor.name not in fed)
        ahead += operation.control_inputs
    return found
