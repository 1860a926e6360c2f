"""Run the fuzz tests until the time is spent: ``python -m tests.fuzz --minutes 60``.

Each round runs one module with a new seed. At the end a table lists cases and failures, and the command that
repeats each failure.
"""

import argparse
import contextlib
import io
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
MODULES = {path.stem.removeprefix("test_"): path for path in sorted(FOLDER.glob("test_*.py"))}
STOPPED = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(eq=False)
class Round:
    """A plugin of pytest: what failed in one run of one module, and the end of the run when time is up."""

    end: float
    failures: dict[str, str] = field(default_factory=dict)  # by test: the report with the reduced example

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures[report.nodeid] = report.longreprtext

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures[report.nodeid] = report.longreprtext

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if time.monotonic() > self.end:
            self.session.shouldstop = "the time is spent"

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session


def command(test: str, seed: int) -> list[str]:
    """The arguments of pytest that run a test, or a whole module, with a seed."""
    return [test, "--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}"]


def run(module: str, seed: int, end: float) -> tuple[dict[str, str], bool]:
    """Run a module. Return the reports of its failures by test, and whether it was interrupted."""
    played, output = Round(end), io.StringIO()
    quiet = ["--capture=sys", "--no-header", "-p", "no:cacheprovider"]
    path = str(MODULES[module])
    with contextlib.redirect_stdout(output):
        code = pytest.main([*command(path, seed), *quiet, "-o", "addopts=--strict-markers"], [played])
    out_of_time = time.monotonic() > end
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, *STOPPED):
        played.failures.setdefault(path, output.getvalue())
    return played.failures, code == pytest.ExitCode.INTERRUPTED and not out_of_time


def main() -> int:
    """Parse the command line, run the rounds, print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to run")
    parser.add_argument("--only", default=",".join(MODULES), help="modules, separated by commas")
    parser.add_argument("--seed", type=int, help="the seed from which those of the rounds are drawn")
    options = parser.parse_args()
    modules = options.only.split(",")
    if unknown := set(modules) - set(MODULES):
        parser.error(f"unknown modules {', '.join(sorted(unknown))}; known: {', '.join(MODULES)}")
    first = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    seeds, end = random.Random(first), time.monotonic() + 60 * options.minutes
    print(f"seed {first}, {options.minutes:g} minutes", flush=True)

    cases: Counter[str] = Counter()
    repeated: dict[str, str] = {}  # the command that repeats each failure, by test
    failures: Counter[str] = Counter()
    for module in itertools.cycle(modules):
        if time.monotonic() > end:
            break
        seed, start = seeds.randrange(2**32), time.monotonic()
        try:
            found, interrupted = run(module, seed, end)
        except KeyboardInterrupt:
            found, interrupted = {}, True
        number = counted(module)
        cases[module] += number
        failures[module] += len(found)
        for test, report in found.items():
            print(report, flush=True)
            repeated[test] = " ".join(command(f"'{test}'", seed))
        seconds = time.monotonic() - start
        print(
            f"{module:20} seed {seed:10} {number:7} cases {len(found):3} failures {seconds:6.1f} s",
            flush=True,
        )
        if interrupted:
            print("interrupted", flush=True)
            break

    print(f"\n{'module':20} {'cases':>9} {'failures':>9}")
    for module in (*dict.fromkeys(modules), "all"):
        count = [sum(table.values()) if module == "all" else table[module] for table in (cases, failures)]
        print(f"{module:20} {count[0]:9} {count[1]:9}")
    for test in repeated.values():
        print(f"repeat: python -m pytest {test}")
    return 1 if failures.total() else 0


def counted(module: str) -> int:
    """The cases that the last round completed."""
    conftest = sys.modules.get("tests.fuzz.conftest")
    return conftest.CASES.pop(f"test_{module}", 0) if conftest is not None else 0


if __name__ == "__main__":
    sys.exit(main())
