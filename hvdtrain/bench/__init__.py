"""``hvdtrain bench``: how fast collectives, training and starting are on this machine.

``cli`` reads arguments and starts ranks; ``python -m hvdtrain.bench`` is what each rank runs.
"""

from __future__ import annotations

__all__: list[str] = []
