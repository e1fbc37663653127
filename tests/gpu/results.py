"""The results of the suite: verdicts, the table, and the file for ``--json``."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.text import format_table, plural
from tests.gpu.claims import Claim, Judgement
from tests.gpu.detect import Hardware, Layout

__all__ = ["Result", "Verdict", "conclude", "exit_code", "format_results", "judged", "to_json"]

Verdict = Literal["pass", "fail", "no verdict", "not run"]
WIDTH = 50


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one claim."""

    name: str  # name of the claim
    text: str  # the claim
    where: str = ""  # the ranks and GPUs that its job used; empty if it did not run
    verdict: Verdict  # whether the claim holds; ``no verdict`` if there is only a value
    measured: str  # the measured value, or why the claim failed or did not run
    seconds: float = 0.0  # duration of the claim
    values: Any = None  # all values


def judged(claim: Claim, layout: Layout, judgement: Judgement, seconds: float) -> Result:
    """Return the result of a claim whose job ran. Times on CPUs get no verdict."""
    verdict: Verdict = "no verdict"
    if judgement.holds is not None and (layout.gpus or not claim.is_timing):
        verdict = "pass" if judgement.holds else "fail"
    return Result(
        name=claim.name,
        text=claim.text,
        where=str(layout),
        verdict=verdict,
        measured=judgement.measured,
        seconds=seconds,
        values=judgement.values,
    )


NOTES = """\
Bus bandwidth is 2 (n - 1) / n * bytes / time for n ranks, as in nccl-tests. Times on CPUs get no
verdict, and the bandwidth gets one only if all_reduce_perf of nccl-tests is on PATH."""


def format_results(results: Sequence[Result]) -> str:
    """Format the table. Long cells continue in the next lines."""
    rows = []
    for result in results:
        columns: list[list[str]] = [
            textwrap.wrap(result.name),
            textwrap.wrap(result.text, WIDTH),
            textwrap.wrap(result.where),
            [part for line in result.measured.splitlines() for part in textwrap.wrap(line, WIDTH)],
            [result.verdict],
        ]
        for number in range(max(map(len, columns))):
            rows.append([column[number] if number < len(column) else "" for column in columns])
    head = ("name", "claim", "where", "measured", "verdict")
    return f"{format_table(head, rows, left=range(len(head)))}\n\n{NOTES}"


def conclude(results: Sequence[Result], hardware: Hardware) -> str:
    """Return the last line."""
    counts = {
        verdict: sum(result.verdict == verdict for result in results)
        for verdict in ("pass", "fail", "no verdict", "not run")
    }
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    text = f"{plural(len(results), 'claim')}: {', '.join(parts)}"
    if not hardware.gpus:
        text += "\nThere is no GPU, so this tested the suite and TensorFlow's ring on CPUs."
    return text


def exit_code(results: Sequence[Result]) -> int:
    """Return 1 if a claim failed, or if none ran."""
    ran = [result for result in results if result.verdict != "not run"]
    return int(not ran or any(result.verdict == "fail" for result in ran))


def to_json(results: Sequence[Result], hardware: Hardware, versions: Any) -> dict[str, Any]:
    """Return the content of the file for ``--json``."""
    return {
        "versions": versions,
        "hardware": dataclasses.asdict(hardware),
        "results": [dataclasses.asdict(result) for result in results],
    }
