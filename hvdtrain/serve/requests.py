"""Helpers that the routes of the page share: the job that is named, and JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hvdtrain.errors import HvdtrainError
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.serve.index import JobIndex

__all__ = ["acting", "job_of"]

_MOST_BODY = 1 << 20


def job_of(index: JobIndex, request: Request) -> JobFolder:
    """The job that a path names.

    Raises:
        HTTPException: There is none.
    """
    job = index.folder(request.path_params["name"])
    if job is None:
        raise HTTPException(404, "There is no such job.")
    return job


def acting(
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
        if len(data) > _MOST_BODY:
            raise HTTPException(413, "That is too long.")
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "Expected JSON.") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "Expected a JSON object.")
    return body
