"""``hvdtrain serve`` as a process of its own."""

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
    """The process, and what it says.

    Args:
        jobs_dir: The folder of jobs.
        options: Further options.
        environ: Further variables.

    Attributes:
        process: The process.
        url: Where it listens.
        token: Lets somebody in.
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
        """An answer, to somebody who has the token."""
        return urllib.request.urlopen(self._asked(path), timeout=20)

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        self.process.kill()
        self.process.communicate(timeout=20)

    def _asked(self, path: str) -> urllib.request.Request:
        headers = {"authorization": f"Bearer {self.token}"}
        return urllib.request.Request(self.url + path, headers=headers)
