"""Stand-ins for `calibrant` and `python` that need not import anything: a server forks each process.

Imports take seconds, and many tests start programs.

Two more things would take most of the time of documented commands: a thousand resamples, of which there are
20 here unless a command says how many, and drawing. Pictures are made, and saved without their content.

A folder, put first on ``PATH``, has a stand-in for each command. It hands its arguments, folder, environment
and open files to the server, and exits as the fork does. If it is killed, the fork is. Programs that start
processes, as `torchrun` and `multiprocessing` do, start the stand-in too.
"""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from .distributed.processes import PREPARED

RESAMPLING = ("calibrate", "compare", "evaluate", "leaderboard", "sweep", "tune")
"""The commands with an option ``--resamples``."""

STAND_IN = """#!{python} -IS
import json, os, socket, sys
def passed_on(number):
    try:
        return os.get_inheritable(number)
    except OSError:  # of the listing itself
        return False
streams = [number for number in map(int, os.listdir("/dev/fd")) if passed_on(number)]
call = {{"arguments": sys.argv, "streams": streams, "folder": os.getcwd(), "environment": dict(os.environ)}}
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [json.dumps(call).encode()], streams)
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(16) or 1))
"""


@contextmanager
def quick_programs(folder: Path) -> Iterator[Path]:
    """The folder with the stand-ins, as long as their server runs."""
    address = str(folder / "server")
    for name in ("calibrant", "python"):
        stand_in = folder / name
        stand_in.write_text(STAND_IN.format(python=sys.executable, address=address))
        stand_in.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = PREPARED.Process(target=serve, args=(listener,))
        server.start()
    try:
        yield folder
    finally:
        server.kill()
        server.join()


def build_commands_once() -> None:
    """Build the commands once. Otherwise typer builds all of them, in 0.1 s, whenever one is run."""
    import typer.main
    import typer.testing

    typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)


def serve(listener: socket.socket) -> NoReturn:
    """Answer calls for ever."""
    import torch
    import typer.main
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from calibrant.cli import app

    with suppress(ImportError):  # what the first command of every fork would import
        import typer._adapters
    # torchrun --standalone looks for the name of a function in all modules: here there are thousands.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""

    torch.set_num_threads(1)
    build_commands_once()
    typer.main.get_command(app)  # for all forks
    compile_templates()
    gc.freeze()  # a fork need not search what was imported for garbage, which would copy all of it
    signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(-1, os.WNOHANG))  # leave no zombies
    while True:
        call, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            answer(call)
        call.close()


def compile_templates() -> None:
    """Compile the templates of all pages, with those that they import."""
    from calibrant.reports import page

    environment = page.template("report.html.jinja").environment
    for name in environment.list_templates(extensions=["jinja"]):
        environment.get_template(name)
        page.template(name)


def draw_blank() -> None:
    """Save an empty figure of the same size instead of each."""
    from matplotlib.figure import Figure

    from calibrant.reports.plots import drawing

    save = drawing._saved
    pictures: dict[tuple[float, float, str], bytes] = {}

    def blank(figure: Figure, **options: object) -> bytes:
        width, height = figure.get_size_inches()
        kind = width, height, str(options["format"])
        if kind not in pictures:
            pictures[kind] = save(Figure(figsize=(width, height)), **options)
        return pictures[kind]

    drawing._saved = blank


def answer(call: socket.socket) -> NoReturn:
    """Run the command in a process of its own, and tell the stand-in its exit status."""
    message, streams, _, _ = socket.recv_fds(call, 1 << 20, 64)
    while more := call.recv(1 << 20):
        message += more
    if process := os.fork():
        stand_in = select.poll()
        stand_in.register(call, 0)
        while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
            if stand_in.poll(10):  # milliseconds; it was killed
                os.kill(process, signal.SIGKILL)
        with suppress(OSError):
            call.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())
        os._exit(0)
    call.close()
    content = json.loads(message)
    high = [fcntl.fcntl(stream, fcntl.F_DUPFD, 256) for stream in streams]  # out of the way of one another
    for number, stream in zip(content["streams"], high, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(content["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(content["folder"])
    name, *arguments = content["arguments"]
    sys.executable = str(Path(name).with_name("python"))
    multiprocessing.set_executable(sys.executable)
    sys.modules["__main__"] = program = ModuleType("__main__")
    try:
        if Path(name).name == "calibrant":
            run_calibrant(name, arguments)
        else:
            run_python(program, arguments)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_calibrant(name: str, arguments: list[str]) -> None:
    """What the command `calibrant` does."""
    from matplotlib.figure import Figure

    from calibrant.cli import main
    from calibrant.reports import comparison_page

    draw_blank()
    comparison_page.reliability_grid = lambda data, title: Figure()  # a diagram for every run
    if arguments and arguments[0] in RESAMPLING and "--resamples" not in arguments:
        arguments[1:1] = ["--resamples", "20"]
    sys.argv = [name, *arguments]
    main()


def run_python(program: ModuleType, arguments: list[str]) -> None:
    """What `python` does with a file, ``-m module``, ``-c code``, and code from its standard input."""
    flags = list(takewhile(lambda argument: argument in ("-B", "-u"), arguments))
    sys.argv = arguments[len(flags) :] or ["-"]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] in ("-", "-c"):
        sys.path.insert(0, "")
        exec(sys.stdin.read() if sys.argv[0] == "-" else sys.argv.pop(1), vars(program))
    else:
        file = Path(sys.argv[0]).absolute()  # worker processes import it, see `multiprocessing.spawn`
        program.__file__ = str(file)
        sys.path.insert(0, str(file.parent))
        exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), vars(program))
