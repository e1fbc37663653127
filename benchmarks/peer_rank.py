"""One rank of a job of ``against_peers.py``.

    python peer_rank.py '{"program": "allreduce", "library": "torch", "result": "/tmp/x.json", ...}'

Runs the module of ``peers.ranks`` that the job names; rank 0 writes its results as JSON. The job
also contains the environment variables of all ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Measure, and write the results."""
    job = json.loads(sys.argv[1])
    os.environ.update(job["environ"])
    # hvdtrain, which other environments don't contain.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    results = importlib.import_module(f"peers.ranks.{job['program']}").measure(job)
    if results is not None:
        path = Path(job["result"])
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(results))
        draft.rename(path)


if __name__ == "__main__":
    main()
