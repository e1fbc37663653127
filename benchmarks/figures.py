"""Figures of the benchmarks, which need matplotlib."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

__all__ = ["place_of_figures", "save_figure"]


def place_of_figures(text: str) -> Path:
    """Returns the path that an argument names; refused before anything is measured in vain."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "needs matplotlib, which is not installed: pip install matplotlib"
        )
    return Path(text)


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure; the same figures give the same file."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "hvdtrain"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"written to {path}")
