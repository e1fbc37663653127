"""What Keras' guides and its pages on the API show, each as a small model and a way to train it."""

from __future__ import annotations

from tests.keras.patterns.callbacks import CALLBACKS
from tests.keras.patterns.layers import LAYERS
from tests.keras.patterns.loops import LOOPS
from tests.keras.patterns.pattern import Pattern
from tests.keras.patterns.steps import STEPS

__all__ = ["PATTERNS"]

PATTERNS: dict[str, Pattern] = {**STEPS, **LAYERS, **LOOPS, **CALLBACKS}
