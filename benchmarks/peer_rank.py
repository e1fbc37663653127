"""One rank of a job of ``against_peers.py``.

    python peer_rank.py '{"program": "allreduce", "library": "torch", "result": "/tmp/x.json", ...}'

The module of ``peers.ranks`` that the job names measures; the first rank writes what it found as
JSON. No variable of a launcher is needed for what all ranks are to have in their environment: the
job has it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Measure, and write."""
    job = json.loads(sys.argv[1])
    os.environ.update(job["environ"])
    # hvdtrain's models and measurements, which environments of others do not have installed.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    found = importlib.import_module(f"peers.ranks.{job['program']}").measure(job)
    if found is not None:
        result = Path(job["result"])
        written = result.with_suffix(".part")
        written.write_text(json.dumps(found))
        written.rename(result)


if __name__ == "__main__":
    main()
