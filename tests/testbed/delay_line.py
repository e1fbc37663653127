"""Delayed links: ``python -m tests.testbed.delay_line MS PID [PID ...]``.

Replaces netem, which kernels may lack. Each host sends into a TUN device, which this program
reads; it holds each packet for MS milliseconds and passes it to the head, which forwards it. It
runs on the head and prints ``ready`` once the devices exist: ``eth1`` in the network of each PID,
``delayed`` in its own. The devices end with the program.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

from tests.testbed.requirements import find_command

__all__ = ["BACK", "OUT"]

OUT = "eth1"
BACK = "delayed"
# From linux/if_tun.h.
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_LARGEST_PACKET = 65536


def _open_device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _hand_over(pid: int) -> int:
    """Create a device in the network of a process."""
    device = _open_device(OUT)
    argv = [find_command("ip"), "link", "set", OUT, "netns", str(pid)]
    subprocess.run(argv, check=True, timeout=10)
    return device


def _relay(sources: list[int], back: int, delay_s: float) -> None:
    """Forward packets with a constant delay until this process ends."""
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(sources, [], [], timeout_s)
        due_s = time.monotonic() + delay_s
        for source in ready:
            waiting.append((due_s, os.read(source, _LARGEST_PACKET)))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(back, waiting.popleft()[1])


def main() -> None:
    """Create the devices and relay packets."""
    delay_s = float(sys.argv[1]) / 1e3
    back = _open_device(BACK)
    sources = [_hand_over(int(pid)) for pid in sys.argv[2:]]
    print("ready", flush=True)
    _relay(sources, back, delay_s)


if __name__ == "__main__":
    main()
