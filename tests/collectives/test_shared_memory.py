"""How much shared memory a host's ranks take."""

from __future__ import annotations

import pytest

from hvdtrain.collectives.shared_memory import ring_slots

MIB = 1 << 20


@pytest.mark.parametrize(
    ("local_size", "chunk_bytes", "free_bytes", "expected"),
    [
        pytest.param(2, 2 * MIB, None, 16, id="fills-the-ring"),
        pytest.param(8, 2 * MIB, 1 << 40, 5, id="shared-by-more-ranks"),
        pytest.param(64, 2 * MIB, 1 << 40, 4, id="never-below-four"),
        pytest.param(2, 64, 1 << 40, 524288, id="small-chunks"),
        pytest.param(2, 2 * MIB, 192 * MIB, 16, id="half-of-what-is-free"),
        pytest.param(2, 2 * MIB, 64 * MIB, 4, id="small-container"),
    ],
)
def test_slots(local_size: int, chunk_bytes: int, free_bytes: int | None, expected: int) -> None:
    assert ring_slots(local_size, chunk_bytes, free_bytes) == expected
