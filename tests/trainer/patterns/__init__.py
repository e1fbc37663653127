"""Examples from Keras' guides and API pages, each with a small model and its training."""

from __future__ import annotations

from tests.trainer.patterns.callbacks import CALLBACKS
from tests.trainer.patterns.layers import LAYERS
from tests.trainer.patterns.loops import LOOPS
from tests.trainer.patterns.options import OPTIONS
from tests.trainer.patterns.pattern import Pattern
from tests.trainer.patterns.steps import STEPS

PATTERNS: dict[str, Pattern] = {**STEPS, **LAYERS, **LOOPS, **CALLBACKS, **OPTIONS}
