"""One rank of a benchmark: ``python -m hvdtrain.bench NAME OPTIONS``.

OPTIONS is a JSON object with the fields of the benchmark's options.
"""

from __future__ import annotations

import json
import sys

from hvdtrain.bench.cli import measure_here

__all__: list[str] = []

if __name__ == "__main__":
    measure_here(sys.argv[1], json.loads(sys.argv[2]))
