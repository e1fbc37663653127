"""``python -m hvdtrain`` is the command ``hvdtrain``."""

from __future__ import annotations

import sys

from hvdtrain.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
