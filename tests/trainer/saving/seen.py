"""A metric that counts how often each sample is used."""

from typing import Any

import keras

__all__ = ["Seen"]


class Seen(keras.metrics.Metric):
    """The least and the greatest number of times that a sample was used in the epoch.

    Args:
        samples: The number of samples. Their ids are in the second column of the targets.
    """

    def __init__(self, samples: int) -> None:
        super().__init__(name="seen")
        self._samples = samples
        self.counts = self.add_weight(shape=(samples,), initializer="zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ids = keras.ops.cast(y_true[:, 1], "int32")
        self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(ids, self._samples), axis=0))

    def result(self) -> dict[str, Any]:
        return {"least": keras.ops.min(self.counts), "most": keras.ops.max(self.counts)}
