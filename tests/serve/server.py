"""``hvdtrain serve`` as a separate process."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tests.harness.jobs import clean_environment

__all__ = ["Server"]


class Server:
    """A process of ``hvdtrain serve``.

    Attributes:
        process: The process.
        url: The URL of the page, without a slash at the end.
        token: The token.
    """

    def __init__(
        self, jobs_dir: Path, *options: str, environ: Mapping[str, str] | None = None
    ) -> None:
        argv = [sys.executable, "-m", "hvdtrain", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            [*argv, "--jobs-dir", str(jobs_dir), *options],
            env={**clean_environment(), **(environ or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        found = re.search(r"are at (http://localhost:\d+)/", self.process.stderr.readline())
        assert found is not None
        self.url = found[1]
        self.token = (jobs_dir / ".serve-token").read_text().strip()

    def get(self, path: str) -> urllib.request.addinfourl:
        """Request a path with the token."""
        headers = {"authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        return urllib.request.urlopen(request, timeout=20)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.communicate(timeout=20)
