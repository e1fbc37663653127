"""The files of the page, read once: a view takes twenty of them.

They are offered twice: under their names, and below a word that stands for what is in all of them.
What has that word a browser keeps without asking again, and after an update there is another word,
so that the files always fit each other.
"""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["StaticFiles"]

_PREFIX = b"/static/"
_FOR_GOOD = "private, max-age=31536000, immutable"


class StaticFiles:
    """The files of a folder, as a route.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self._files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        content = b"".join(name.encode() + data for name, data in self._files.items())
        self._word = hashlib.sha256(content).hexdigest()[:16]
        for name, data in self._files.items():
            if name.endswith(".html"):
                named = _PREFIX + self._word.encode() + b"/"
                self._files[name] = data.replace(_PREFIX, named)

    def page(self, name: str, code: int = 200) -> Response:
        """A page, whose files have the word."""
        return Response(self._files[name], code, media_type="text/html")

    async def answer(self, request: Request) -> Response:
        """The file that ``{path}`` names."""
        path: str = request.path_params["path"]
        word, _, rest = path.partition("/")
        for_good = word == self._word
        name = rest if for_good else path
        if name not in self._files:
            return Response("There is no such file.\n", 404, media_type="text/plain")
        answer = Response(self._files[name], media_type=mimetypes.guess_type(name)[0])
        if for_good:
            answer.headers["cache-control"] = _FOR_GOOD
        return answer
