"""``hvdtrain bench``: measurements of collectives, training and starting on this machine.

``cli`` parses the arguments and starts the ranks. Each rank runs ``python -m hvdtrain.bench``.
"""

from __future__ import annotations

__all__: list[str] = []
