"""``hvdtrain show``: the details of a job."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.job_commands.arguments import add_name, named_job
from hvdtrain.jobs.files import last_json_line, read_json_lines
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import JobView, remaining_s, view_job
from hvdtrain.text import format_duration, format_list, format_table

__all__ = ["add_arguments", "command_line", "run"]

_RANK_COLUMNS = {
    "step": "step",
    "phase": "phase",
    "own_s": "own s/step",
    "waited_s": "waited s",
    "input_s": "input s",
    "rss_mb": "RSS MiB",
    "cpu": "cores",
    "gpu": "GPU %",
    "gpu_mb": "GPU MiB",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdtrain show``."""
    parser.usage = "hvdtrain show NAME [--ranks] [--json]"
    add_name(parser)
    parser.add_argument("--ranks", action="store_true", help="add a table of the ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the details of a job."""
    job = named_job(arguments)
    view = view_job(job)
    events = list(read_json_lines(job.events))
    if arguments.json:
        newest = {"metrics": last_json_line(job.metrics), "ranks_now": last_json_line(job.ranks)}
        print(json.dumps({**view.to_json(), **newest, "events": events}))
        return 0
    print("\n".join([*_describe(job, view), *map(_event_line, events)]))
    if arguments.ranks:
        print(_rank_table(last_json_line(job.ranks)))
    return 0


def _describe(job: JobFolder, view: JobView) -> Iterator[str]:
    metrics, spec, state = last_json_line(job.metrics), view.spec, view.state
    end = time.time() if view.ended_s is None else view.ended_s
    code = "" if state.code is None else f", exit code {state.code}"
    versions = [f"{name} {version}" for name, version in spec.versions.items()]
    total = "" if state.total_steps is None else f" of {state.total_steps}"
    facts = {
        "job": view.name,
        "state": f"{view.status}{code}, after {format_duration(end - view.created_s)}",
        "program": command_line(spec.program),
        "options": command_line(spec.options),
        "directory": spec.folder,
        "versions": ", ".join(
            filter(None, [spec.version and f"hvdtrain {spec.version}", *versions, state.mpi])
        ),
        "ranks": f"{state.ranks} on {format_list(state.hosts, 'hosts')}" if state.ranks else "",
        "step": ""
        if state.step is None
        else f"{state.step}{total} (epoch {(state.epoch or 0) + 1})",
        "remaining": ""
        if (left_s := remaining_s(job, view)) is None
        else f"about {format_duration(left_s)}",
        "loss": "" if (loss := metrics.get("loss")) is None else f"{loss:.4g}",
        "slowest": _slowest(metrics),
        "checkpoint": "" if state.saved is None else f"step {state.saved}",
        "attempts": str(state.attempt) if state.attempt > 1 else "",
        "folder": str(job.path),
        "reason": view.verdict.replace("\n", f"\n{'':12}"),
    }
    yield from (f"{name:<11} {text}" for name, text in facts.items() if text)


def command_line(program: Sequence[str]) -> str:
    """Return a command as one line, quoted for a shell, with unprintable characters escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in shlex.join(program)
    )


def _slowest(metrics: Mapping[str, Any]) -> str:
    if held := metrics.get("held_by"):
        ranks = "ranks" if len(held) > 1 else "rank"
        return f"no progress: the other ranks wait for {ranks} {format_list(held)}"
    if "slow" not in metrics:
        return ""
    where = f" on {host}" if (host := metrics.get("slow_host")) else ""
    return f"rank {metrics['slow']}{where}: {metrics['slow_factor']} times the usual step time"


def _rank_table(row: Mapping[str, Any]) -> str:
    """Format a row of ``ranks.jsonl`` as a table, without columns that no rank reports."""
    unknown = [None] * len(row.get("step", []))
    if not unknown:
        return "the ranks have not reported yet"
    columns = {name: row.get(name, unknown) for name in _RANK_COLUMNS}
    columns = {name: column for name, column in columns.items() if column != unknown}
    cells = [
        [str(rank), *("" if value is None else str(value) for value in values)]
        for rank, values in enumerate(zip(*columns.values()))
    ]
    left = tuple(place for place, name in enumerate(columns, 1) if name == "phase")
    return format_table(["rank", *(_RANK_COLUMNS[name] for name in columns)], cells, left=left)


def _event_line(event: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event.get("time", 0))))
    fields = {name: value for name, value in event.items() if name not in ("time", "kind")}
    message = str(fields.pop("words", "")).partition("\n")[0]
    details = ", ".join(_detail(name, value) for name, value in fields.items() if value)
    return f"{at} {event.get('kind')}: {details}{f' ({message})' if message else ''}"


def _detail(name: str, value: Any) -> str:
    if name == "lost_s":
        return f"lost {format_duration(value)}"
    if isinstance(value, dict):
        return f"{name} {', '.join(f'{host}:{count}' for host, count in value.items())}"
    if isinstance(value, float):
        # A share of the job's time, from a summary.
        return f"{name} {value:.0%}"
    return f"{name} {format_list(value) if isinstance(value, list) else value}"
