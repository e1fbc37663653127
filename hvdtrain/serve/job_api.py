"""The routes that show and control jobs. All of them respond with JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hvdtrain.errors import HvdtrainError, JobError
from hvdtrain.job_commands.arguments import make_request, new_job_request, split_backend
from hvdtrain.jobs.backends import backend_for
from hvdtrain.jobs.files import last_json_line, read_json_lines, sampled_json_lines, size_of
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import JobView, goodput, metrics_rows, remaining_s
from hvdtrain.jobs.log import LogEntry, LogLine, log_end, read_before, read_log
from hvdtrain.jobs.spec import LOCAL, JobSpec, change_spec, make_spec, secret_values
from hvdtrain.jobs.submission import restart_job, stop_job, submit_job
from hvdtrain.launch.option_files import with_files
from hvdtrain.serve.index import JobIndex, matching
from hvdtrain.text import parse_ranges

__all__ = ["JobApi", "job_of", "view_to_json"]

MOST_JOBS = 100
MOST_LINES = 2000
# Characters per line of a log, because browsers can't show millions of them.
MOST_CHARACTERS = 1 << 14
MOST_POINTS = 2000
# Serializing a row of a thousand ranks takes a millisecond.
MOST_RANK_ROWS = 300
MOST_RANK_CELLS = 40_000
# The number of points of a curve in the list, and how often a running job's curve is read.
CURVE_POINTS = 32
CURVE_INTERVAL_S = 10.0
MOST_CURVES = 5000
MOST_BODY_BYTES = 1 << 20
# How long one request searches a log.
SEARCH_S = 0.1


class JobApi:
    """The routes for jobs."""

    def __init__(self, index: JobIndex, environ: Mapping[str, str]) -> None:
        self._index = index
        self._environ = environ
        self._curves = CurveCache()

    def routes(self) -> list[Route]:
        """Return the routes."""
        job = "/api/jobs/{name}"
        return [
            Route("/api/jobs", self._list_jobs, methods=["GET"]),
            Route("/api/jobs", _action(self._submit_job), methods=["POST"]),
            Route("/api/plan", _action(self._plan), methods=["POST"]),
            Route(job, self._show, methods=["GET"]),
            Route(f"{job}/metrics", self._metrics, methods=["GET"]),
            Route(f"{job}/ranks", self._ranks, methods=["GET"]),
            Route(f"{job}/log", self._log, methods=["GET"]),
            Route(f"{job}/stop", _action(self._stop), methods=["POST"]),
            Route(f"{job}/restart", _action(self._restart), methods=["POST"]),
            Route(f"{job}/clone", _action(self._clone), methods=["POST"]),
        ]

    def _list_jobs(self, request: Request) -> Response:
        """Return a page of matching jobs, the newest first, and how many jobs are in each state."""
        query = request.query_params
        views = self._index.views()
        matches = matching(views, query.get("q", ""), query.get("status", ""))
        begin, count = _number(query, "begin", 0), min(_number(query, "count", 50), MOST_JOBS)
        rows = [self._row(view) for view in matches[begin : begin + count]]
        counts = Counter(view.status for view in views)
        return JSONResponse({"jobs": rows, "found": len(matches), "counts": counts})

    def _row(self, view: JobView) -> Mapping[str, Any]:
        job = JobFolder(self._index.directory / view.name)
        return {
            **view_to_json(view),
            "metrics": last_json_line(job.metrics),
            "left_s": remaining_s(job, view),
            **self._curves.get(job, is_over=view.is_over),
        }

    def _show(self, request: Request) -> Response:
        """Return the details of a job."""
        job, view = self._job_and_view(request)
        spec = view.spec
        # The values of secrets were never recorded.
        own = {"hvdtrain": spec.version} if spec.version else {}
        environment = {"versions": {**own, **spec.versions}, "variables": dict(spec.variables)}
        return JSONResponse(
            {
                **view_to_json(view),
                "metrics": last_json_line(job.metrics),
                "left_s": remaining_s(job, view),
                "ranks_now": last_json_line(job.ranks),
                "events": list(read_json_lines(job.events)),
                "log_end": log_end(job.log),
                "path": str(job.path),
                "environment": environment,
            }
        )

    def _metrics(self, request: Request) -> Response:
        """Return the metrics of a job over time, one list per metric."""
        job = job_of(self._index, request)
        count = min(_number(request.query_params, "count", 600), MOST_POINTS)
        rows = list(metrics_rows(job, count))
        names = sorted({name for row in rows for name in row})
        return JSONResponse({name: [row.get(name) for row in rows] for name in names})

    def _ranks(self, request: Request) -> Response:
        """Return rows with each rank's own time per step, and ``now``: the newest, complete row."""
        job = job_of(self._index, request)
        newest = last_json_line(job.ranks)
        ranks = max(1, len(newest.get("own_s", [])))
        count = min(_number(request.query_params, "count", 120), MOST_RANK_ROWS)
        sample = sampled_json_lines(job.ranks, min(count, max(1, MOST_RANK_CELLS // ranks)))
        rows = [{"time": row.get("time"), "own_s": row.get("own_s", [])} for row in sample]
        return JSONResponse({"rows": rows, "now": newest})

    def _log(self, request: Request) -> Response:
        """Return the lines from position ``begin`` on, or the lines before position ``before``.

        Without either parameter, return the last lines of the log. To get the lines that follow,
        pass the response's ``next`` as ``begin``. To get the lines that come earlier, pass the
        response's ``begin`` as ``before``.
        """
        job, query = job_of(self._index, request), request.query_params
        count = min(_number(query, "count", 500), MOST_LINES)
        ranks, text = _rank_ranges(query.get("ranks", "")), query.get("grep", "")

        def matches(line: LogLine) -> bool:
            return text in line.text and (ranks is None or any(line.rank in run for run in ranks))

        if "begin" not in query:
            end = _number(query, "before", log_end(job.log))
            part = read_before(job.log, end, count, matches, patience_s=SEARCH_S)
            rows = [_entry_to_json(entry) for entry in part.entries]
            return JSONResponse({"lines": rows, "begin": part.begin, "next": part.end})
        lines, position = [], _number(query, "begin", 0)
        until = time.monotonic() + SEARCH_S
        complete = True
        for entry in read_log(job.log, position):
            position = entry.end
            if entry.line is None or matches(entry.line):
                lines.append(_entry_to_json(entry))
            if len(lines) >= count or time.monotonic() > until:
                complete = False
                break
        return JSONResponse({"lines": lines, "next": position, "complete": complete})

    def _plan(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        """Return the plan of a job without starting it."""
        job = new_job_request(self._index.directory, *self._new_spec(body))
        return {"plan": backend_for(job.spec).plan(job).preview()}

    def _submit_job(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        return self._submit(*self._new_spec(body))

    def _stop(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        job, view = self._job_and_view(request)
        if not view.is_over:
            stop_job(job, view, save=body.get("save") is True)
        return {"name": job.name, "status": view.status}

    def _restart(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        job = job_of(self._index, request)
        options, environ = self._options(body, job.read_spec().folder)
        restart_job(job, lambda spec: make_request(job, _changed(spec, options, body), environ))
        return {"name": job.name}

    def _clone(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        spec = job_of(self._index, request).read_spec()
        options, environ = self._options(body, spec.folder)
        return self._submit(_changed(spec, options, body), environ)

    def _submit(self, spec: JobSpec, environ: Mapping[str, str]) -> Mapping[str, Any]:
        job = submit_job(new_job_request(self._index.directory, spec, environ))
        self._index.refresh()
        return {"name": job.name}

    def _job_and_view(self, request: Request) -> tuple[JobFolder, JobView]:
        job = job_of(self._index, request)
        view = self._index.view(job.name)
        if view is None:
            raise _no_such_job()
        return job, view

    def _options(self, body: Mapping[str, Any], folder: str) -> tuple[list[str], Mapping[str, str]]:
        """Return two things: the options in a request, and the environment of the job.

        Option files are replaced by their contents.
        """
        options = with_files(_words(body, "options"), Path(folder))
        return options, {**self._environ, **secret_values(options)}

    def _new_spec(self, body: Mapping[str, Any]) -> tuple[JobSpec, Mapping[str, str]]:
        """Return two things: the specification of a new job, and the environment of the job.

        The program and its options are not restricted. A request can therefore run anything that
        the user of this process can run.
        """
        program = _words(body, "program")
        folder = body.get("folder")
        if not isinstance(folder, str) or not os.path.isdir(folder):
            raise JobError(f"folder must be an existing folder, got {folder!r}.")
        options, environ = self._options(body, folder)
        options, backend = split_backend(options)
        spec = make_spec(options, program, {})
        return dataclasses.replace(spec, folder=folder, backend=backend or LOCAL), environ


class CurveCache:
    """Caches each job's curve and goodput until the job's files change or the job ends."""

    def __init__(self) -> None:
        self._cache: dict[str, tuple[tuple[int, int, bool], float, Mapping[str, Any]]] = {}

    def get(self, job: JobFolder, *, is_over: bool) -> Mapping[str, Any]:
        """Return the ``curve`` and the ``goodput`` of a job.

        The curve contains ``values`` and ``of``. ``of`` is the kind of the values: ``loss``, or
        ``rate`` (samples per second) if the program does not report its loss.
        """
        # The end of a job may be noticed after the last change of its files.
        version, now = (size_of(job.metrics), size_of(job.events), is_over), time.monotonic()
        cached, read_at, details = self._cache.get(job.name, ((-1, -1, False), 0.0, {}))
        is_fresh = not is_over and now - read_at < CURVE_INTERVAL_S and details
        if cached != version and not is_fresh:
            curve = _curve(list(sampled_json_lines(job.metrics, CURVE_POINTS)))
            details = {"curve": curve, "goodput": goodput(job) if is_over else None}
            if len(self._cache) > MOST_CURVES:
                self._cache.clear()
            self._cache[job.name] = version, now, details
        return details


def _curve(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), (int, float))]
    if losses:
        return {"of": "loss", "values": losses}
    known = [row for row in rows if isinstance(row.get("samples"), (int, float))]
    # The counter starts again after a restart.
    rates = [
        (row["samples"] - before["samples"]) / (row["time"] - before["time"])
        for before, row in itertools.pairwise(known)
        if row["time"] > before["time"] and row["samples"] > before["samples"]
    ]
    return {"of": "rate", "values": rates}


def _changed(spec: JobSpec, options: Sequence[str], body: Mapping[str, Any]) -> JobSpec:
    options, backend = split_backend(options)
    program = _words(body, "program")
    return change_spec(spec, [*options, *(["--", *program] if program else [])], backend)


def view_to_json(view: JobView) -> Mapping[str, Any]:
    """Return a job as the page expects it."""
    return {**view.to_json(), "is_over": view.is_over}


def _entry_to_json(entry: LogEntry) -> list[Any]:
    """Return a line as ``[begin, end, time, rank, stream, text]``, or a gap as ``[begin, end]``."""
    line = entry.line
    if line is None:
        return [entry.begin, entry.end]
    text = line.text
    if (more := len(text) - MOST_CHARACTERS) > 0:
        text = f"{text[:MOST_CHARACTERS]} ... {more} more characters; use hvdtrain logs"
    return [entry.begin, entry.end, line.time_s, line.rank, line.stream, text]


def _words(body: Mapping[str, Any], name: str) -> list[str]:
    words = body.get(name, [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise JobError(f"{name} must be a list of strings, got {words!r}.")
    if any("\0" in word for word in words):
        raise JobError(f"{name} must not contain null characters.")
    return words


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise HTTPException(400, f"{name} must be a whole number, got {text!r}.")
    return int(text)


def _rank_ranges(text: str) -> Sequence[range] | None:
    if not text:
        return None
    try:
        return parse_ranges(text)
    except ValueError as error:
        raise HTTPException(400, f"ranks: {error}") from None


def job_of(index: JobIndex, request: Request) -> JobFolder:
    """Return the folder of the job in the path of a request.

    Raises:
        HTTPException: If there is no such job.
    """
    job = index.folder(request.path_params["name"])
    if job is None:
        raise _no_such_job()
    return job


def _no_such_job() -> HTTPException:
    return HTTPException(404, "There is no such job.")


def _action(
    act: Callable[[Mapping[str, Any], Request], Mapping[str, Any]],
) -> Callable[[Request], Any]:
    """Return a route that calls ``act`` with JSON on a thread, and responds with JSON."""

    async def respond(request: Request) -> Response:
        try:
            body = await _body(request)
            return JSONResponse(await run_in_threadpool(act, body, request))
        except HvdtrainError as error:
            return JSONResponse({"error": str(error)}, 400)
        except SystemExit:
            # argparse raises this, for instance for --help.
            return JSONResponse({"error": "These options are not supported here."}, 400)

    return respond


async def _body(request: Request) -> Mapping[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "Expected application/json.")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BODY_BYTES:
            raise HTTPException(413, "The request is too large.")
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "Expected JSON.") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "Expected a JSON object.")
    return body
