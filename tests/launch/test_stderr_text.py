"""What lines of stderr are is known by their form."""

from __future__ import annotations

import pytest

from hvdtrain.launch.stderr_text import begins_traceback, is_information


@pytest.mark.parametrize(
    "line",
    [
        "I0000 00:00:1795552261.046417   17820 port.cc:153] oneDNN custom operations are on.",
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    ],
)
def test_information(line: str) -> None:
    assert is_information(line)


@pytest.mark.parametrize(
    "line",
    [
        "W0000 00:00:1795552261.046417   17820 gpu_device.cc:2342] Cannot dlopen some libraries",
        "E0000 00:00:1795552261.046417   17820 cuda_fft.cc:467] Unable to register cuFFT factory",
        # The program's own, through absl-py.
        "I1124 20:29:51.046417 140 train.py:12] epoch 3",
        "In 0000 00:00:17 all is well",
        "",
    ],
)
def test_all_else_is_shown(line: str) -> None:
    assert not is_information(line)


def test_what_begins_a_traceback() -> None:
    assert begins_traceback("Traceback (most recent call last):")
    assert begins_traceback("Fatal Python error: Aborted")
    assert not begins_traceback("  Traceback (most recent call last):")
    assert not begins_traceback("During handling of the above exception")
