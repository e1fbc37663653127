"""A picture of the table of ``hvdtrain bench allreduce``."""

from __future__ import annotations

from typing import Any

__all__ = ["plot_sizes"]


def plot_sizes(rows: list[dict[str, Any]], ranks: int, path: str) -> None:
    """Draw time and bandwidth over size into ``path``; its ending says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = [row["bytes"] for row in rows]
    figure, (times, bandwidths) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    figure.suptitle(f"allreduce, {ranks} ranks, {rows[0]['engine']}")
    times.plot(sizes, [row["best_s"] * 1e6 for row in rows], "o-", label="allreduce, best")
    times.plot(sizes, [row["median_s"] * 1e6 for row in rows], "o:", label="allreduce, median")
    times.plot(sizes, [row["copy_best_s"] * 1e6 for row in rows], "s--", label="copy, best")
    times.set(xlabel="bytes a rank", ylabel="microseconds", yscale="log")
    bandwidths.plot(sizes, [row["bus_bandwidth"] / 1e9 for row in rows], "o-", label="busbw")
    bandwidths.plot(sizes, [row["copy_bandwidth"] / 1e9 for row in rows], "s--", label="copy")
    bandwidths.set(xlabel="bytes a rank", ylabel="GB/s", ylim=(0, None))
    for axes in (times, bandwidths):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
