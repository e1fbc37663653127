"""The routes of the page that tell of jobs and steer them; each answers with JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hvdtrain.errors import HvdtrainError, JobError
from hvdtrain.job_commands.requests import new_job_request, request_for
from hvdtrain.job_commands.stop import stop_job
from hvdtrain.jobs.backends import backend_of
from hvdtrain.jobs.files import last_json_line, read_json_lines, sampled_json_lines, size_of
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import JobView, left_s
from hvdtrain.jobs.log import LogEntry, LogLine, log_end, read_before, read_log
from hvdtrain.jobs.metrics import goodput, metrics_rows
from hvdtrain.jobs.naming import split_backend
from hvdtrain.jobs.spec import LOCAL, JobSpec, make_spec, secret_values, with_changes
from hvdtrain.jobs.submission import start_again, submit_job
from hvdtrain.launch.option_files import with_files
from hvdtrain.serve.index import JobIndex, matching
from hvdtrain.text import parse_ranges

__all__ = ["JobApi", "entry_to_json", "job_of", "view_to_json"]

MOST_JOBS = 100
MOST_LINES = 2000
# Of a line: a browser does not show millions of them.
MOST_CHARACTERS = 1 << 14
MOST_POINTS = 2000
# Of many ranks fewer rows: a row of a thousand ranks takes a millisecond.
MOST_RANK_ROWS = 300
MOST_RANK_CELLS = 40_000
# Of the curves in the list; those of running jobs are drawn again no more often than this.
POINTS = 32
CURVE_INTERVAL_S = 10.0
MOST_CURVES = 5000
MOST_BODY = 1 << 20
# How long a request may look through a log; it says where it stopped.
SEARCH_S = 0.1


class JobApi:
    """Jobs, as the page asks for them.

    Args:
        index: All jobs.
        environ: Variables for what is started.
    """

    def __init__(self, index: JobIndex, environ: Mapping[str, str]) -> None:
        self._index = index
        self._environ = environ
        self._curves = CurveCache()

    def routes(self) -> list[Route]:
        """All routes, with the methods that they have."""
        return [
            Route("/api/jobs", self.list_jobs, methods=["GET"]),
            Route("/api/jobs", _acting(self.submit), methods=["POST"]),
            Route("/api/plan", _acting(self.plan), methods=["POST"]),
            Route("/api/jobs/{name}", self.show, methods=["GET"]),
            Route("/api/jobs/{name}/metrics", self.metrics, methods=["GET"]),
            Route("/api/jobs/{name}/ranks", self.ranks, methods=["GET"]),
            Route("/api/jobs/{name}/log", self.log, methods=["GET"]),
            Route("/api/jobs/{name}/stop", _acting(self.stop), methods=["POST"]),
            Route("/api/jobs/{name}/restart", _acting(self.restart), methods=["POST"]),
            Route("/api/jobs/{name}/clone", _acting(self.clone), methods=["POST"]),
        ]

    def list_jobs(self, request: Request) -> Response:
        """Answer with the newest jobs that fit, and how many there are of each state."""
        query = request.query_params
        views = self._index.views()
        found = matching(views, query.get("q", ""), query.get("status", ""))
        begin, count = _number(query, "begin", 0), min(_number(query, "count", 50), MOST_JOBS)
        counts: dict[str, int] = {}
        for view in views:
            counts[view.status] = counts.get(view.status, 0) + 1
        rows = [self._row(view) for view in found[begin : begin + count]]
        return JSONResponse({"jobs": rows, "found": len(found), "counts": counts})

    def show(self, request: Request) -> Response:
        """Answer with all that is known of a job."""
        job = job_of(self._index, request)
        view = self._index.view(job.name)
        assert view is not None
        return JSONResponse(
            {
                **view_to_json(view),
                "metrics": last_json_line(job.metrics),
                "left_s": left_s(job, view),
                "ranks_now": last_json_line(job.ranks),
                "events": list(read_json_lines(job.events)),
                "log_end": log_end(job.log),
                "path": str(job.path),
                "environment": _environment(view.spec),
            }
        )

    def metrics(self, request: Request) -> Response:
        """Answer with how far a job was, over time: a list for each thing that was measured."""
        job = job_of(self._index, request)
        count = min(_number(request.query_params, "count", 600), MOST_POINTS)
        rows = list(metrics_rows(job, count))
        names = sorted({name for row in rows for name in row})
        return JSONResponse({name: [row.get(name) for row in rows] for name in names})

    def ranks(self, request: Request) -> Response:
        """Answer with each rank's own time for a step, over time, and all known of them ``now``."""
        job = job_of(self._index, request)
        now = last_json_line(job.ranks)
        ranks = max(1, len(now.get("own_s", [])))
        count = min(_number(request.query_params, "count", 120), MOST_RANK_ROWS)
        found = sampled_json_lines(job.ranks, min(count, max(1, MOST_RANK_CELLS // ranks)))
        rows = [{"time": row.get("time"), "own_s": row.get("own_s", [])} for row in found]
        return JSONResponse({"rows": rows, "now": now})

    def log(self, request: Request) -> Response:
        """Answer with lines of a log: from ``begin`` on, the last, or those ``before`` a position.

        ``next`` is where the next part begins, ``begin`` before what earlier ones can be asked for.
        """
        job, query = job_of(self._index, request), request.query_params
        count = min(_number(query, "count", 500), MOST_LINES)
        ranks, text = _ranks(query.get("ranks", "")), query.get("grep", "")

        def wanted(line: LogLine) -> bool:
            return text in line.text and (ranks is None or any(line.rank in run for run in ranks))

        if "begin" not in query:
            end = _number(query, "before", log_end(job.log))
            part = read_before(job.log, end, count, wanted, patience_s=SEARCH_S)
            rows = [entry_to_json(entry) for entry in part.entries]
            return JSONResponse({"lines": rows, "begin": part.begin, "next": part.end})
        lines, position = [], _number(query, "begin", 0)
        until = time.monotonic() + SEARCH_S
        complete = True
        for entry in read_log(job.log, position):
            position = entry.end
            if entry.line is None or wanted(entry.line):
                lines.append(entry_to_json(entry))
            if len(lines) >= count or time.monotonic() > until:
                complete = False
                break
        return JSONResponse({"lines": lines, "next": position, "complete": complete})

    def plan(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        """Answer with the plan of what would be started."""
        job = new_job_request(self._index.directory, *self._asked(body))
        return {"plan": backend_of(job.spec).plan(job).preview()}

    def submit(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        """Start a job."""
        return self._submit(*self._asked(body))

    def stop(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        """Have a job end."""
        job = job_of(self._index, request)
        view = self._index.view(job.name)
        assert view is not None
        if not view.is_over:
            stop_job(job, view, save=body.get("save") is True)
        return {"name": job.name, "status": view.status}

    def restart(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        """Start a job that has ended again."""
        job = job_of(self._index, request)
        words, environ = self._options(body, job.spec().folder)
        start_again(job, lambda spec: request_for(job, _changed(spec, words, body), environ))
        return {"name": job.name}

    def clone(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        """Start a job like another one."""
        spec = job_of(self._index, request).spec()
        words, environ = self._options(body, spec.folder)
        return self._submit(_changed(spec, words, body), environ)

    def _submit(self, spec: JobSpec, environ: Mapping[str, str]) -> Mapping[str, Any]:
        job = submit_job(new_job_request(self._index.directory, spec, environ))
        self._index.refresh()
        return {"name": job.name}

    def _options(self, body: Mapping[str, Any], folder: str) -> tuple[list[str], Mapping[str, str]]:
        """Return the options of a request, files replaced, and the variables for its job."""
        words = with_files(_words(body, "options"), Path(folder))
        return words, {**self._environ, **secret_values(words)}

    def _asked(self, body: Mapping[str, Any]) -> tuple[JobSpec, Mapping[str, str]]:
        """Return the job that is asked for, and its variables.

        Nothing of it is restricted: any program, with any options, runs as this process's user.
        """
        program = _words(body, "program")
        folder = body.get("folder")
        if not isinstance(folder, str) or not os.path.isdir(folder):
            raise JobError(f"folder is {folder!r}; expected one that is there.")
        words, environ = self._options(body, folder)
        rest, backend = split_backend(words)
        spec = make_spec(rest, program, {})
        return dataclasses.replace(spec, folder=folder, backend=backend or LOCAL), environ

    def _row(self, view: JobView) -> Mapping[str, Any]:
        job = JobFolder(self._index.directory / view.name)
        return {
            **view_to_json(view),
            "metrics": last_json_line(job.metrics),
            "left_s": left_s(job, view),
            **self._curves.of(job, is_over=view.is_over),
        }


class CurveCache:
    """The curve and the goodput of jobs, read again when a job's files change or it ends."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int, bool], float, Mapping[str, Any]]] = {}

    def of(self, job: JobFolder, *, is_over: bool) -> Mapping[str, Any]:
        """Return the ``curve`` and the ``goodput`` of a job.

        The curve has ``values`` from the first to the last, and what they are ``of``: the loss, or
        samples per second if the program reports no loss.
        """
        # A job may be known to be over only after its files are complete.
        stamp, now = (size_of(job.metrics), size_of(job.events), is_over), time.monotonic()
        before, read_at, details = self._known.get(job.name, ((-1, -1, False), 0.0, {}))
        is_fresh = not is_over and now - read_at < CURVE_INTERVAL_S and details
        if before != stamp and not is_fresh:
            curve = _curve(list(sampled_json_lines(job.metrics, POINTS)))
            details = {"curve": curve, "goodput": goodput(job) if is_over else None}
            if len(self._known) > MOST_CURVES:
                self._known.clear()
            self._known[job.name] = stamp, now, details
        return details


def _curve(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), (int, float))]
    if losses:
        return {"of": "loss", "values": losses}
    known = [row for row in rows if isinstance(row.get("samples"), (int, float))]
    # Without the time across a restart.
    rates = [
        (row["samples"] - before["samples"]) / (row["time"] - before["time"])
        for before, row in itertools.pairwise(known)
        if row["time"] > before["time"] and row["samples"] > before["samples"]
    ]
    return {"of": "rate", "values": rates}


def _changed(spec: JobSpec, words: Sequence[str], body: Mapping[str, Any]) -> JobSpec:
    options, backend = split_backend(words)
    program = _words(body, "program")
    return with_changes(spec, [*options, *(["--", *program] if program else [])], backend)


def view_to_json(view: JobView) -> Mapping[str, Any]:
    """A job as the page takes it."""
    return {**view.to_json(), "is_over": view.is_over}


def entry_to_json(entry: LogEntry) -> list[Any]:
    """Begin, end, time, rank, stream and text of a line; begin and end of a gap."""
    line = entry.line
    if line is None:
        return [entry.begin, entry.end]
    text = line.text
    if (more := len(text) - MOST_CHARACTERS) > 0:
        text = f"{text[:MOST_CHARACTERS]} ... {more} more characters: hvdtrain logs prints them"
    return [entry.begin, entry.end, line.time_s, line.rank, line.stream, text]


def _environment(spec: JobSpec) -> Mapping[str, Any]:
    """Return the versions and variables that a job runs with."""
    # Values of secrets were never written.
    own = {"hvdtrain": spec.version} if spec.version else {}
    return {"versions": {**own, **spec.versions}, "variables": dict(spec.variables)}


def _words(body: Mapping[str, Any], name: str) -> list[str]:
    words = body.get(name, [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise JobError(f"{name} is {words!r}; expected a list of words.")
    if any("\0" in word for word in words):
        raise JobError(f"{name} holds a word with a zero byte.")
    return words


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise HTTPException(400, f"{name} is {text!r}; expected a whole number.")
    return int(text)


def _ranks(text: str) -> Sequence[range] | None:
    if not text:
        return None
    try:
        return parse_ranges(text)
    except ValueError as error:
        raise HTTPException(400, f"ranks: {error}") from None


def job_of(index: JobIndex, request: Request) -> JobFolder:
    """Return the folder of the job that a path names.

    Raises:
        HTTPException: There is no such job.
    """
    job = index.folder(request.path_params["name"])
    if job is None:
        raise HTTPException(404, "There is no such job.")
    return job


def _acting(
    act: Callable[[Mapping[str, Any], Request], Mapping[str, Any]],
) -> Callable[[Request], Any]:
    """Return a route that reads JSON, acts on a thread, and answers or refuses in JSON."""

    async def answer(request: Request) -> Response:
        try:
            body = await _body(request)
            return JSONResponse(await run_in_threadpool(act, body, request))
        except HvdtrainError as error:
            return JSONResponse({"error": str(error)}, 400)
        except SystemExit:
            return JSONResponse({"error": "hvdtrain run has no such options."}, 400)

    return answer


async def _body(request: Request) -> Mapping[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "Expected application/json.")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BODY:
            raise HTTPException(413, "That is too long.")
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "Expected JSON.") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "Expected a JSON object.")
    return body
