"""What ranks work out together as they enter a job; pure."""

from __future__ import annotations

from hvdtrain.job_entry import _host_indices


def test_hosts_are_counted_by_their_first_rank() -> None:
    hosts = ["b", "a", "b", "c", "a"]
    assert _host_indices(hosts) == (0, 1, 0, 2, 1)
