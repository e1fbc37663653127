"""``hvdtrain serve``: shows and controls jobs in a browser."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import socket
import webbrowser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hvdtrain.errors import ConfigurationError
from hvdtrain.job_commands.arguments import add_jobs_dir, directory_of

if TYPE_CHECKING:
    from hvdtrain.serve.security import OneTimeCodes

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__package__)

PORT = 8264
TOKEN = ".serve-token"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Enough time to copy a link to another machine.
CODE_S = 300.0
_EPILOG = """\
The page shows and controls the jobs of one folder. You can stop hvdtrain serve at any time without
affecting jobs. Unless --read-only is given, anyone with the token in that folder (.serve-token) can
run any program as you.
To open the page on a different machine, run ssh -L 8264:localhost:8264 HOST there, then open
http://localhost:8264/.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdtrain serve``."""
    parser.usage = "hvdtrain serve [--open] [--port N] [options]"
    parser.epilog = _EPILOG
    add_jobs_dir(parser)
    network = parser.add_argument_group("network")
    network.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default %(default)s"
    )
    network.add_argument(
        "--port", type=int, default=PORT, help="port to listen on, 0 for any; default %(default)s"
    )
    network.add_argument("--open", action="store_true", help="open a browser and log in")
    network.add_argument(
        "--name",
        action="append",
        default=[],
        help="additional hostname in the page's URL; may be repeated",
    )
    network.add_argument(
        "--tls-cert", metavar="FILE", help="TLS certificate; required if other hosts can connect"
    )
    network.add_argument("--tls-key", metavar="FILE", help="private key of the certificate")
    parser.add_argument(
        "--rank-metrics",
        action="store_true",
        help="export metrics of each rank of running jobs to Prometheus: several series per rank",
    )
    parser.add_argument(
        "--read-only", action="store_true", help="refuse to start, stop and change jobs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until a signal ends this process."""
    packages = ("starlette", "uvicorn", "prometheus_client")
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ConfigurationError(
            f"hvdtrain serve needs {', '.join(missing)}: python -m pip install 'hvdtrain[serve]'"
        )
    tls = bool(arguments.tls_cert and arguments.tls_key)
    if arguments.host not in _LOOPBACK and not tls:
        raise ConfigurationError(
            f"--host {arguments.host} would send the token over the network unencrypted. Add "
            "--tls-cert and --tls-key, or remove --host and connect from the other host with "
            f"ssh -L {arguments.port}:localhost:{arguments.port} {socket.gethostname()}"
        )
    import uvicorn

    from hvdtrain.serve.app import make_app
    from hvdtrain.serve.index import JobIndex
    from hvdtrain.serve.security import Keys, OneTimeCodes, allowed_hosts, read_token

    directory = directory_of(arguments)
    token = read_token(directory / TOKEN)
    listener = _listen(arguments.host, arguments.port)
    port = listener.getsockname()[1]
    scheme = "https" if tls else "http"
    codes = OneTimeCodes(CODE_S)
    app = make_app(
        JobIndex(directory),
        Keys(token),
        hosts=allowed_hosts(arguments.host, port, arguments.name),
        scheme=scheme,
        codes=codes,
        read_only=arguments.read_only,
        rank_metrics=arguments.rank_metrics,
    )
    page = f"{scheme}://localhost:{port}/"
    logger.info(f"jobs of {directory} are at {page}")
    redirect = None
    if arguments.open:
        redirect = _open_browser(page, codes)
        logger.info(f"if no browser opens: {_link(page, codes)} logs in once within {CODE_S:.0f} s")
    else:
        logger.info(f"the token is in {directory / TOKEN}; --open opens a browser and logs in")
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
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        if redirect is not None:
            redirect.cleanup()
    return 0


def _link(page: str, codes: OneTimeCodes) -> str:
    return f"{page}login?code={codes.issue()}"


def _open_browser(page: str, codes: OneTimeCodes) -> TemporaryDirectory[str]:
    """Open the page in a browser and log in; return the temporary folder that this needs.

    The browser gets the path of a private file in that folder, which redirects to a link with a
    one-time code. It does not get the link itself, because other users can see the arguments of a
    process.
    """
    folder = TemporaryDirectory(prefix="hvdtrain-open-")
    file = Path(folder.name, "open.html")
    refresh = f'<meta http-equiv="refresh" content="0; url={_link(page, codes)}">'
    file.write_text(f"<!doctype html>{refresh}<title>hvdtrain</title>\n", encoding="ascii")
    webbrowser.open(file.as_uri())
    return folder


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigurationError(
            f"can't listen on {host} port {port}: {error.strerror}. Choose another --port."
        ) from None
