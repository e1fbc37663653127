"""Runs in a worker's pod that is to end, before it does: waits until no ranks are left there.

The launcher sees that the pod is to end, and has all ranks save what they have. How long that may
take is what Kubernetes calls the pod's grace period.
"""

from __future__ import annotations

import time

import psutil

from hvdtrain.agent.messages import JOB

__all__ = ["has_ranks", "main"]

POLL_S = 0.2


def has_ranks() -> bool:
    """Whether processes of a job run here: those that a launcher has given its word."""
    for process in psutil.process_iter():
        try:
            if JOB in process.environ():
                return True
        except psutil.Error:
            # It has ended, or it is another user's.
            continue
    return False


def main() -> None:
    """Wait until there are none."""
    while has_ranks():
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
