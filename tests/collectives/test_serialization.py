"""Objects to bytes and back."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.collectives.serialization import decode, encode
from hvdtrain.errors import ConfigurationError


@pytest.mark.parametrize("obj", [None, 0, 1.5, "grüße", [1, [2]], {"a": None}], ids=repr)
@pytest.mark.parametrize("codec", ["json", "pickle"])
def test_there_and_back(obj, codec) -> None:
    data = encode(obj, codec)
    assert (data.dtype, data.ndim) == (np.uint8, 1)
    assert decode(data, codec) == obj


def test_json_is_plain_text() -> None:
    assert encode({"a": [1, "b"]}, "json").tobytes() == b'{"a": [1, "b"]}'


def test_tuples_become_lists() -> None:
    assert decode(encode((1, (2,)), "json"), "json") == [1, [2]]


def test_what_json_can_not_hold() -> None:
    loop: list = []
    loop.append(loop)
    for obj in ({1}, b"", np.ones(2), object(), {(1,): 2}, loop):
        with pytest.raises(ConfigurationError, match=type(obj).__name__):
            encode(obj, "json")


def test_unknown_codec() -> None:
    with pytest.raises(ConfigurationError, match="codec='yaml'"):
        encode(1, "yaml")
