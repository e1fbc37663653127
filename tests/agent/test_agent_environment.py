"""Where the launcher listens, written and read back."""

from __future__ import annotations

import pytest

from hvdtrain.agent.agent_environment import format_addresses, parse_addresses
from hvdtrain.errors import LaunchError


@pytest.mark.parametrize(
    "hosts", [["127.0.0.1"], ["10.0.0.1", "fd00::1", "fe80::1%eth0", "head.cluster"]]
)
def test_what_was_written_is_read(hosts: list[str]) -> None:
    text = format_addresses(hosts, 4711)
    assert parse_addresses(text) == [(host, 4711) for host in hosts]


@pytest.mark.parametrize("text", ["", " ", "4711", "10.0.0.1", "10.0.0.1:4711", "10.0.0.1 -1"])
def test_anything_else_says_how_to_start(text: str) -> None:
    with pytest.raises(LaunchError, match=r"HVDTRAIN_LAUNCHER='.*start ranks with hvdtrain run"):
        parse_addresses(text)
