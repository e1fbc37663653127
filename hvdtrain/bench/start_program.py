"""The program that ``hvdtrain bench startup`` starts. It times the parts of its start."""

from __future__ import annotations

import importlib
import json
import os
import time

from hvdtrain.config.keras_backend import configured_backend

__all__ = ["MARK", "main"]

MARK = "hvdtrain-start-probe "


def main() -> None:
    """Import the backend's framework, start hvdtrain, and print the slowest times as JSON."""
    times_s = [time.perf_counter()]
    importlib.import_module(configured_backend(os.environ))
    times_s.append(time.perf_counter())
    import hvdtrain

    hvdtrain.init()
    times_s.append(time.perf_counter())
    import numpy as np

    from hvdtrain import world

    parts = world.collectives().allreduce(np.diff(times_s), "max", name="hvdtrain bench")
    names = ("import_framework_s", "init_s")
    if hvdtrain.is_chief():
        print(MARK + json.dumps(dict(zip(names, map(float, parts)))), flush=True)


if __name__ == "__main__":
    main()
