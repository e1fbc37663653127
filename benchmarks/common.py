"""Options, tables and the test cluster of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
# Other environments don't contain hvdtrain.
sys.path.insert(0, str(REPOSITORY))

# Changes of an environment; None removes a variable.
Environ = dict[str, str | None]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows the docstring of a program."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_head(*cells: str) -> None:
    """Print the head of a Markdown table."""
    print_row(*cells)
    print("|---" * len(cells) + "|")


def print_row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


@contextmanager
def shaped_cluster(
    count: int, rate: str, queue_ms: int = 20, round_trip_ms: float = 0
) -> Iterator[tuple[Any, Environ]]:
    """Start the test cluster, and yield it with the environment for its programs."""
    from tests.launch.jobs import ON_CLUSTER
    from tests.testbed.cluster import Cluster

    with Cluster(size=count) as cluster:
        if round_trip_ms:
            cluster.delay(round_trip_ms / 2)
        cluster.shape(rate, queue_ms)
        yield cluster, {**ON_CLUSTER, "OMPI_MCA_osc": "^ucx", "TF_CPP_MIN_LOG_LEVEL": "2"}
