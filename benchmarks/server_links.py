"""A parameter server and workers on other hosts, beside what plain TCP makes of its link.

    python benchmarks/server_links.py
    python benchmarks/server_links.py --hosts 4 --rate 1gbit

Hosts are those of the tests, on this machine: it needs root, and the packages of
tests/testbed/packages.txt. Each has a rank, the last one the server, which takes gradients and
gives weights as fast as it can (``hvdtrain bench servers``). For each update the gradient comes in
over the server's link and the weights go out, both at the same time at best.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from cluster_jobs import HVDTRAIN, JOB_TIMEOUT_S, Hosts, mpirun_between, shaped_cluster

LINK_CALLS = Path(__file__).with_name("link_calls.py")
# For the speed of the link; an allreduce of n hosts moves 2 (n - 1) / n of it each way.
TCP_BYTES = 16 << 20
RUNS = 3


def main() -> None:
    """Measure, and say how much of the link is used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=3, help="3 or more; default %(default)s")
    parser.add_argument("--rate", default="200mbit", help="of each link; default %(default)s")
    parser.add_argument("--queue-ms", type=int, default=20, help="before it; default %(default)s")
    parser.add_argument("--updates", type=int, default=10, help="of a worker in a run; default 10")
    asked = parser.parse_args()
    with shaped_cluster(asked.hosts, asked.rate, asked.queue_ms) as (cluster, environ):
        of_links = {"call": "allreduce", "bytes": [TCP_BYTES], "runs": RUNS, "compression": []}
        job = json.dumps({**of_links, "hosts": asked.hosts})
        found = Hosts(cluster, environ, 1).run(HVDTRAIN, [LINK_CALLS, HVDTRAIN, job])
        moved = TCP_BYTES * 2 * (asked.hosts - 1) / asked.hosts
        tcp = moved / median(found["TCP"][str(TCP_BYTES)])

        result = cluster.folder / "servers.json"
        argv, changes = mpirun_between(cluster.hosts, 1, horovods=False)
        bench = ("bench", "servers", f"--updates={asked.updates}", f"--runs={RUNS}")
        argv += [sys.executable, "-m", "hvdtrain", *bench, f"--json={result}"]
        done = cluster.run(argv, env={**environ, **changes}, timeout_s=JOB_TIMEOUT_S)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}\nthe ranks ended: {done.returncode}")
        measured = json.loads(result.read_text())
    row = measured["rows"][-1]
    print(f"{row['workers']} workers, links of {asked.rate}, queues of {asked.queue_ms} ms")
    for name, update_s in (("best", min(row["update_s"])), ("median", median(row["update_s"]))):
        speed = measured["nbytes"] / update_s
        print(
            f"{name}: {1 / update_s:.2f} updates a second, {speed / 1e6:.1f} MB/s each way, "
            f"{speed / tcp:.0%} of TCP's {tcp / 1e6:.1f} MB/s"
        )


if __name__ == "__main__":
    main()
