"""The program that ``hvdtrain bench startup`` starts. It times the parts of its own start."""

from __future__ import annotations

import json
import time

__all__ = ["MARK", "main"]

MARK = "hvdtrain-start-probe "


def main() -> None:
    """Import TensorFlow and start hvdtrain. The chief prints the slowest rank's times as JSON."""
    times_s = [time.perf_counter()]
    import tensorflow  # noqa: F401

    times_s.append(time.perf_counter())
    import hvdtrain

    hvdtrain.init()
    times_s.append(time.perf_counter())
    import numpy as np

    from hvdtrain import world

    parts = world.collectives().allreduce(np.diff(times_s), "max", name="hvdtrain bench")
    names = ("import_tensorflow_s", "init_s")
    if hvdtrain.is_chief():
        print(MARK + json.dumps(dict(zip(names, map(float, parts)))), flush=True)


if __name__ == "__main__":
    main()
