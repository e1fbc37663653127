"""``hvdtrain show``: the details of a job."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.jobs.files import last_json_line, read_json_lines
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import JobView, command_line, left_s, view_job
from hvdtrain.jobs.naming import add_name, named_job
from hvdtrain.text import format_duration, format_list, format_table

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain show``."""
    parser.usage = "hvdtrain show NAME [--ranks] [--json]"
    add_name(parser)
    parser.add_argument("--ranks", action="store_true", help="with a table of its ranks")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the details of a job.

    Raises:
        JobError: There is no such job.
    """
    job = named_job(arguments)
    view = view_job(job)
    events = list(read_json_lines(job.events))
    if arguments.json:
        newest = {"metrics": last_json_line(job.metrics), "ranks_now": last_json_line(job.ranks)}
        print(json.dumps({**view.to_json(), **newest, "events": events}))
        return 0
    print("\n".join(_describe(job, view)))
    for event in events:
        print(_event(event))
    if arguments.ranks:
        print(_table_of_ranks(last_json_line(job.ranks)))
    return 0


def _describe(job: JobFolder, view: JobView) -> Iterator[str]:
    now, spec, state = last_json_line(job.metrics), view.spec, view.state
    ends = time.time() if view.ended_s is None else view.ended_s
    code = "" if state.code is None else f", exit code {state.code}"
    versions = [f"{name} {version}" for name, version in spec.versions.items()]
    of = "" if state.total_steps is None else f" of {state.total_steps}"
    facts = {
        "job": view.name,
        "state": f"{view.status}{code}, after {format_duration(ends - view.created_s)}",
        "program": command_line(spec.program),
        "options": command_line(spec.options),
        "in": spec.folder,
        "versions": ", ".join(
            filter(None, [spec.version and f"hvdtrain {spec.version}", *versions, state.mpi])
        ),
        "ranks": f"{state.ranks} on {format_list(state.hosts, 'hosts')}" if state.ranks else "",
        "step": "" if state.step is None else f"{state.step}{of} (epoch {(state.epoch or 0) + 1})",
        "left": "" if (left := left_s(job, view)) is None else f"about {format_duration(left)}",
        "loss": "" if (loss := now.get("loss")) is None else f"{loss:.4g}",
        "slowest": _slowest(now),
        "checkpoint": "" if state.saved is None else f"of step {state.saved}",
        "attempts": str(state.attempt) if state.attempt > 1 else "",
        "folder": str(job.path),
        "why": view.verdict.replace("\n", "\n            "),
    }
    yield from (f"{name:<11} {text}" for name, text in facts.items() if text)


def _slowest(now: Mapping[str, Any]) -> str:
    if held := now.get("held_by"):
        return f"no rank goes on: the others wait for rank {format_list(held)}"
    if "slow" not in now:
        return ""
    where = f" on {host}" if (host := now.get("slow_host")) else ""
    factor = now["slow_factor"]
    return f"rank {now['slow']}{where}: a step takes it {factor} times as long as the others"


def _table_of_ranks(now: Mapping[str, Any]) -> str:
    """Format what each rank did when that was written last; what is not known is left empty."""
    shown = {
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
    unknown = [None] * len(now.get("step", []))
    if not unknown:
        return "its ranks have reported nothing"
    # What no rank tells, such as its input outside of Keras' fit, is no column.
    columns = {name: now.get(name, unknown) for name in shown}
    known = {name: column for name, column in columns.items() if column != unknown}
    rows = [
        [str(rank), *("" if value is None else str(value) for value in values)]
        for rank, values in enumerate(zip(*known.values()))
    ]
    left = tuple(place for place, name in enumerate(known, 1) if name == "phase")
    return format_table(["rank", *(shown[name] for name in known)], rows, left=left)


def _event(event: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event.get("time", 0))))
    fields = {name: value for name, value in event.items() if name not in ("time", "kind")}
    words = str(fields.pop("words", "")).partition("\n")[0]
    told = ", ".join(f"{name} {_plain(value)}" for name, value in fields.items() if value)
    return f"{at} {event.get('kind')}: {told}{f' ({words})' if words else ''}"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}:{count}" for name, count in value.items())
    return format_list(value) if isinstance(value, list) else str(value)
