"""Examples from Keras' guides and API pages, each with a small model and its training."""

from __future__ import annotations

from tests.keras.patterns.callbacks import CALLBACKS
from tests.keras.patterns.layers import LAYERS
from tests.keras.patterns.loops import LOOPS
from tests.keras.patterns.pattern import Pattern
from tests.keras.patterns.steps import STEPS

PATTERNS: dict[str, Pattern] = {**STEPS, **LAYERS, **LOOPS, **CALLBACKS}
