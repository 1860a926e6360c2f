"""The command `calibrant` without its imports, which take seconds: a server forks a process for each call.

Two more things would take most of the time of documented commands: a thousand resamples, of which there are
50 here unless a command says how many, and drawing. Pictures are made, and saved without their content.

Run as a program, this module is the server. Its folder, put first on ``PATH``, has a stand-in for `calibrant`
that hands its arguments, folder, environment and standard streams to the server, and exits as the fork does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
RESAMPLING = ("calibrate", "compare", "evaluate", "leaderboard", "sweep", "tune")
"""The commands with an option ``--resamples``."""

STAND_IN = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
call = {{"arguments": sys.argv, "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(server, [json.dumps(call).encode()], [0, 1, 2])
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(16) or 1))
"""


@contextmanager
def quick_calibrant(folder: Path) -> Iterator[Path]:
    """The folder with the stand-in, as long as its server runs."""
    address = str(folder / "server")
    stand_in = folder / "calibrant"
    stand_in.write_text(STAND_IN.format(python=sys.executable, address=address))
    stand_in.chmod(0o755)
    command = [sys.executable, "-m", "tests.programs", address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline(), "the server did not start"
            yield folder
        finally:
            server.kill()


def serve(address: str) -> NoReturn:
    """Answer calls for ever."""
    import sklearn.datasets  # noqa: F401

    from calibrant.cli.training_options import import_fabric

    import_fabric()

    import calibrant.reports
    import calibrant.training.loop  # noqa: F401

    draw_blank()
    signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(-1, os.WNOHANG))  # leave no zombies
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while True:
            call, _ = server.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                server.close()
                answer(call)
            call.close()


def draw_blank() -> None:
    """Save an empty figure instead of each."""
    from matplotlib.figure import Figure

    from calibrant.reports.plots import drawing

    save = drawing._saved
    drawing._saved = lambda figure, **options: save(Figure(figsize=(1, 1)), **options)


def answer(call: socket.socket) -> NoReturn:
    """Run the command in a process of its own, and tell the stand-in its exit status."""
    message, streams, _, _ = socket.recv_fds(call, 1 << 20, 3)
    while more := call.recv(1 << 20):
        message += more
    if process := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        call.sendall(str(status).encode())
        os._exit(0)
    call.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    content = json.loads(message)
    os.environ.clear()
    os.environ.update(content["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(content["folder"])
    sys.argv = content["arguments"]
    if sys.argv[1:2] and sys.argv[1] in RESAMPLING and "--resamples" not in sys.argv:
        sys.argv[2:2] = ["--resamples", "50"]
    try:
        from calibrant.cli import main

        main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
