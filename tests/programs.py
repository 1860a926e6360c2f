"""Stand-ins for `calibrant` and `python` that need not import anything: a server forks each process.

Imports take seconds, and many tests start programs.

Two more things would take most of the time of documented commands: a thousand resamples, of which there are
20 here unless a command says how many, and drawing. Pictures are made, and saved without their content.

A folder, put first on ``PATH``, has a stand-in for each command. It hands its arguments, folder, environment
and open files to the server, and exits as the fork does. If it is killed, the fork is. Programs that start
processes, as `torchrun` and `multiprocessing` do, start the stand-in too. So does pytest-xdist: the processes
that run the tests are forks of one server, which serves the programs of all tests.

All forks have the server's hash seed: differences in the order of sets are not seen.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import marshal
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import multiprocessing.util
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

PREPARED = multiprocessing.get_context("forkserver")
"""Starts processes in which what takes seconds to be imported is there already."""

PREPARED.set_forkserver_preload(["tests.preloaded"])

RESAMPLING = ("calibrate", "compare", "evaluate", "leaderboard", "sweep", "tune")
"""The commands with an option ``--resamples``."""

STAND_IN = """#!{python} -IS
import _socket, marshal, posix, sys  # others, such as json, take longer to be imported than all of this
def passed_on(number):
    try:
        return posix.get_inheritable(number)
    except OSError:  # of the listing itself
        return False
streams = [number for number in map(int, posix.listdir("/dev/fd")) if passed_on(number)]
call = marshal.dumps((sys.argv, streams, posix.getcwd(), posix.environ))
sent = b"".join(number.to_bytes(4, sys.byteorder) for number in streams)
server = _socket.socket(_socket.AF_UNIX)
server.connect({address!r})
done = server.sendmsg([call], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sent)])
server.sendall(call[done:])
server.shutdown(_socket.SHUT_WR)
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


@contextmanager
def started_by(python: Path) -> Iterator[None]:
    """Processes that `multiprocessing` spawns are started by another program, such as one that is quick."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(python))
    try:
        yield
    finally:
        multiprocessing.set_executable(before)


def start_processes_quickly(python: Path) -> None:
    """Let the processes of `PREPARED` be forks of the server too."""
    with started_by(python):
        multiprocessing.forkserver.ensure_running()


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
    atexit._clear()  # at its end a fork does what it registered itself, and lets go of semaphores
    atexit.register(multiprocessing.util._exit_function)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the pipe is told
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    waiting.register(ended, select.POLLIN)
    calls: dict[int, socket.socket] = {}  # from the stand-ins, by the process that does what they should
    while True:
        for number, _ in waiting.poll():
            if number == listener.fileno():
                call, _ = listener.accept()
                if (process := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (listener, *calls.values()):
                        other.close()
                    os.close(ended)
                    os.close(wake)
                    answer(call)
                calls[process] = call
                waiting.register(call, 0)  # only for its end
            elif number == ended:
                os.read(number, 1 << 10)
            else:  # a stand-in was killed
                waiting.unregister(number)
                os.kill(next(each for each in calls if calls[each].fileno() == number), signal.SIGKILL)
        while calls:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            call = calls.pop(process)
            with suppress(KeyError):  # it was killed
                waiting.unregister(call)
            with suppress(OSError):
                call.sendall(str(os.waitstatus_to_exitcode(status)).encode())
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
    """Run the command that a stand-in was called with, in this process, and exit as it does."""
    message, streams, _, _ = socket.recv_fds(call, 1 << 20, 64)
    while more := call.recv(1 << 20):
        message += more
    call.close()
    (name, *arguments), numbers, folder, environment = marshal.loads(message)
    high = [fcntl.fcntl(stream, fcntl.F_DUPFD, 256) for stream in streams]  # out of the way of one another
    for number, stream in zip(numbers, high, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environb.update(environment)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(folder)
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
    atexit._run_exitfuncs()
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
