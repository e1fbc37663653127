"""The routes by which the page opens the TensorBoard of a job."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hvdtrain.errors import JobError
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.serve.event_files import find_event_folder
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.requests import acting, job_of
from hvdtrain.serve.tensorboard_site import TensorBoardSite
from hvdtrain.serve.tensorboards import TensorBoards

__all__ = ["TensorBoardApi"]

_MISSING = (
    "TensorBoard is not installed beside the Python of hvdtrain serve: "
    "python -m pip install tensorboard"
)
_NO_NAME = (
    "TensorBoard is shown where the page is at localhost alone, not over TLS: reach it by "
    "ssh -L, as hvdtrain serve --help tells."
)


class TensorBoardApi:
    """Opens TensorBoards.

    Args:
        index: All jobs.
        boards: Those that run.
        site: Where they are shown; None where they can't be.
        read_only: Whether none may be started.
    """

    def __init__(
        self,
        index: JobIndex,
        boards: TensorBoards,
        site: TensorBoardSite | None,
        *,
        read_only: bool,
    ) -> None:
        self._index = index
        self._read_only = read_only
        self._boards = boards
        self._site = site

    def routes(self) -> list[Route]:
        """All routes, with the methods that they have."""
        path = "/api/jobs/{name}/tensorboard"
        return [
            Route(path, self.look, methods=["GET"]),
            Route(path, acting(self.open), methods=["POST"]),
        ]

    async def look(self, request: Request) -> Response:
        """Answer with the folder that would be shown, and why none can be; either may be empty."""
        job = await run_in_threadpool(job_of, self._index, request)
        found = await run_in_threadpool(self._found, job)
        why = self._why_not()
        if not why and found is None:
            why = "No event files were found that this job wrote. Name their folder."
        return JSONResponse({"folder": str(found or ""), "why": why})

    async def open(self, body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        """Start it, and give the link that leads there."""
        why = self._why_not()
        if why or self._site is None:
            raise JobError(why)
        job = await run_in_threadpool(job_of, self._index, request)
        folder = await run_in_threadpool(self._named, job, body.get("folder"))
        try:
            await self._boards.start(job.name, folder)
        except OSError as error:
            raise JobError(f"TensorBoard can't be started: {error}") from None
        return {"url": self._site.link(job.name)}

    def _why_not(self) -> str:
        if self._read_only:
            return "This page starts nothing (--read-only), and so no TensorBoard."
        if self._site is None:
            return _NO_NAME
        return "" if importlib.util.find_spec("tensorboard") else _MISSING

    def _found(self, job: JobFolder) -> Path | None:
        view = self._index.view(job.name)
        if view is None or not view.folder:
            return None
        return find_event_folder(view.folder, view.program, view.created_s, view.ended_s)

    def _named(self, job: JobFolder, given: object) -> Path:
        """The folder that is asked for; whoever may ask may run programs, so that any will do."""
        if not isinstance(given, str) or not given or "\0" in given:
            raise JobError(f"folder is {given!r}; expected one with event files.")
        real = Path(os.path.realpath(Path(job.spec().folder, given)))
        if not real.is_dir():
            raise JobError(f"there is no folder {real}")
        return real
