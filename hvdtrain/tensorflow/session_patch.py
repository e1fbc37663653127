"""What ``tf.compat.v1.Session`` does for operations between ranks, which it knows nothing of.

It has no public way to do something before each run, so its private methods are replaced when the
first such operation is added to a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.private_api.tensorflow import complete_control_outputs, replace_session_methods
from hvdtrain.tensorflow.graph_order import must_run
from hvdtrain.tensorflow.session_order import SessionOrder
from hvdtrain.tensorflow.tf_errors import raise_as_in_tensorflow

__all__ = ["keep_order"]


def keep_order() -> None:
    """From now on sessions run operations between ranks in the order in which they were made.

    Their errors are raised as eagerly.
    """
    replace_session_methods(_keeping_order)
    complete_control_outputs(must_run)


def _keeping_order(extend: Callable[..., Any], run: Callable[..., Any]) -> tuple[Any, Any]:
    """Methods of a session that keep the order, around those that there are."""

    def extend_graph(self: Any) -> None:
        SessionOrder.of(self.graph).extend()
        extend(self)

    def do_run(
        self: Any, handle: Any, targets: Any, fetches: Any, feeds: Any, options: Any, metadata: Any
    ) -> Any:
        order = SessionOrder.of(self.graph)
        order.extend()
        # What partial_run is to run later is not known yet.
        left_out = order.left_out(targets, fetches, feeds) if handle is None else {}
        with raise_as_in_tensorflow():
            return run(self, handle, targets, fetches, feeds | left_out, options, metadata)

    return extend_graph, do_run
