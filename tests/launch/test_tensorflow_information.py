"""TensorFlow's information is known by its form."""

from __future__ import annotations

import pytest

from hvdtrain.launch.tensorflow_information import is_information, is_unwanted


@pytest.mark.parametrize(
    ("level", "unwanted"),
    [(None, True), ("1", True), ("3", True), ("0", False), ("", False), ("x", False)],
)
def test_who_asks_for_information_gets_it(level: str | None, unwanted: bool) -> None:
    environ = {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    assert is_unwanted(environ) is unwanted


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
