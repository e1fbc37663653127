"""``hvdtrain serve``: jobs in a browser."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.naming import add_jobs_dir, directory_of
from hvdtrain.jobs.spec import BackendKind
from hvdtrain.serve.policy import Policy

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__package__)

PORT = 8264
TOKEN = ".serve-token"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_EPILOG = """\
The page shows and steers the jobs of one folder. It may be ended at any time: jobs go on, and
nothing is lost. Whoever has the token in that folder (.serve-token) may see and start jobs as you.
From another machine: ssh -L 8264:localhost:8264 HOST, and open the same link there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain serve``."""
    parser.usage = "hvdtrain serve [--open] [--port N] [options]"
    parser.epilog = _EPILOG
    add_jobs_dir(parser)
    where = parser.add_argument_group("where")
    where.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default %(default)s"
    )
    where.add_argument("--port", type=int, default=PORT, help="default %(default)s; 0 for any")
    where.add_argument("--open", action="store_true", help="open it in a browser, logged in")
    where.add_argument(
        "--name", action="append", default=[], help="another name under which browsers reach it"
    )
    where.add_argument("--tls-cert", metavar="FILE", help="certificate, for other hosts than this")
    where.add_argument("--tls-key", metavar="FILE", help="its private key")
    parser.add_argument(
        "--rank-metrics",
        action="store_true",
        help="tell Prometheus of each rank of jobs that run as well: some series for each",
    )
    may = parser.add_argument_group("what may be started from the page")
    may.add_argument(
        "--allow-folder",
        action="append",
        metavar="DIR",
        help="jobs may run there and below; may be repeated; default: here",
    )
    may.add_argument(
        "--allow-program",
        action="append",
        metavar="PROGRAM",
        help="what a job's command may begin with; may be repeated; default: python, and this one",
    )
    may.add_argument(
        "--allow-backend",
        action="append",
        choices=get_args(BackendKind),
        help="who may run jobs; may be repeated; default: local, and slurm where sbatch is; "
        "kubernetes lets whoever has the token run any image with your rights there",
    )
    may.add_argument("--read-only", action="store_true", help="nothing")


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until a signal comes.

    Raises:
        ConfigurationError: It can't be served so.
        JobError: Jobs have no folders here.
    """
    missing = [
        name
        for name in ("starlette", "uvicorn", "prometheus_client", "httpx2")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigurationError(
            f"the page needs {', '.join(missing)}: python -m pip install 'hvdtrain[serve]'"
        )
    tls = bool(arguments.tls_cert and arguments.tls_key)
    if arguments.host not in _LOCAL and not tls:
        raise ConfigurationError(
            f"--host {arguments.host} would send the token and all else over the network for "
            "others to read. Give --tls-cert and --tls-key; or leave it out, and reach the page by "
            f"ssh -L {arguments.port}:localhost:{arguments.port} {socket.gethostname()}"
        )
    import uvicorn

    from hvdtrain.serve.app import make_app
    from hvdtrain.serve.index import JobIndex
    from hvdtrain.serve.security import Keys, allowed_hosts, read_token
    from hvdtrain.serve.tensorboard_site import HOST as TENSORBOARD_HOST

    directory = directory_of(arguments)
    token = read_token(directory / TOKEN)
    listener = _listen(arguments.host, arguments.port)
    port = listener.getsockname()[1]
    scheme = "https" if tls else "http"
    app = make_app(
        JobIndex(directory),
        Keys(token),
        _policy(arguments),
        hosts=allowed_hosts(arguments.host, port, arguments.name),
        scheme=scheme,
        # No certificate is for that name.
        rank_metrics=arguments.rank_metrics,
        tensorboard_host="" if tls else f"{TENSORBOARD_HOST}:{port}",
    )
    link = f"{scheme}://localhost:{port}/login?token={token}"
    logger.info(f"jobs of {directory} are at {scheme}://localhost:{port}/")
    if arguments.open and not webbrowser.open(link):
        logger.info(f"no browser could be opened; the link that logs in: {link}")
    elif not arguments.open:
        logger.info(f"the token is in {directory / TOKEN}; --open puts it into a link")
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ssl_certfile=arguments.tls_cert if tls else None,
        ssl_keyfile=arguments.tls_key if tls else None,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _policy(arguments: argparse.Namespace) -> Policy:
    if arguments.read_only:
        return Policy()
    folders: Sequence[str] = arguments.allow_folder or [os.getcwd()]
    slurm = ["slurm"] if shutil.which("sbatch") else []
    return Policy(
        folders=[Path(folder).absolute() for folder in folders],
        programs=arguments.allow_program or ["python", sys.executable],
        backends=arguments.allow_backend or ["local", *slurm],
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigurationError(
            f"{host} port {port} can't be listened on: {error.strerror}. Give another --port."
        ) from None
