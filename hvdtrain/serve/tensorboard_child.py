"""The TensorBoard of one job: ``python -m hvdtrain.serve.tensorboard_child ...``.

It listens on a socket in a folder of its user's alone, which it gets from the server: on a port
every user of this host could see what it shows. TensorBoard's own main listens on ports alone.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

from hvdtrain.agent.child_guard import die_with_parent

__all__ = ["child_argv", "main"]


def child_argv(listener: int, path: str, logdir: str, prefix: str) -> list[str]:
    """The command of a child of this process.

    Args:
        listener: The open socket, which the child gets.
        path: Where that lies.
        logdir: The folder of event files.
        prefix: The path under which browsers ask.
    """
    words = [str(os.getpid()), str(listener), path, logdir, prefix]
    return [sys.executable, "-P", "-m", "hvdtrain.serve.tensorboard_child", *words]


def main() -> None:
    """Serve until the server, whose child this is, ends it or dies."""
    server, listener, path, logdir, prefix = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(server):
        # It died before that was said.
        return
    # What TensorBoard looks for to do without TensorFlow, which takes seconds and 500 MiB.
    sys.modules["tensorboard.compat.notf"] = types.ModuleType("tensorboard.compat.notf")
    from tensorboard import program
    from werkzeug.serving import make_server

    class OnSocket:
        """The server that TensorBoard runs its application in, on a socket of the file system."""

        def __init__(self, app: Any, flags: Any) -> None:
            self._server = make_server(f"unix://{path}", 0, app, threaded=True, fd=int(listener))

        def serve_forever(self) -> None:
            """Answer requests."""
            self._server.serve_forever()

        def get_url(self) -> str:
            """Return what TensorBoard would print as its address."""
            return path

    board = program.TensorBoard(server_class=OnSocket)
    # The faster way to read would be another process, which listens on a port.
    flags = ["--logdir", logdir, "--path_prefix", prefix, "--load_fast", "false"]
    board.configure(argv=["tensorboard", *flags])
    board.launch()
    threading.Event().wait()


if __name__ == "__main__":
    main()
