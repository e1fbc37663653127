"""Tests on data of pandas, which other tests run in an environment with pandas."""

from __future__ import annotations

import pandas

from tests.trainer.data.test_arrays import check_kind


def test_data_frames() -> None:
    check_kind(pandas.DataFrame)
