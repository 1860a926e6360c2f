"""Run the fuzz tests until the time is spent: ``python -m tests.fuzz --minutes 60``.

Each round runs one module with a new seed, in a process of its own: what Hypothesis draws from a seed also
depends on the modules that a process has imported. At the end a table lists cases and failures, and the
command that repeats each round with a failure.
"""

import argparse
import itertools
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

MODULES = {path.stem.removeprefix("test_"): path for path in sorted(Path(__file__).parent.glob("test_*.py"))}
GRACE = 60.0  # seconds that a round has to end when the time is spent


def run(command: list[str], end: float) -> tuple[int, int, str]:
    """Run a round until its end or that of the time. Return cases, failures and what it printed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stopped = False
    try:
        output, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        stopped = True
        if isinstance(reason, subprocess.TimeoutExpired):  # else the terminal has told both processes
            process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        if isinstance(reason, KeyboardInterrupt):
            output += "\ninterrupted"
    cases = re.search(r"^(\d+) cases completed$", output, re.MULTILINE)
    failures = len(re.findall(r"^(?:FAILED|ERROR) ", output, re.MULTILINE))
    expected = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if process.returncode not in expected and not stopped:
        failures = max(1, failures)  # a crash
    return int(cases[1]) if cases else 0, failures, output


def main() -> int:
    """Parse the command line, run the rounds, print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to run")
    parser.add_argument("--only", default=",".join(MODULES), help="modules, separated by commas")
    parser.add_argument("--seed", type=int, help="the seed from which those of the rounds are drawn")
    options = parser.parse_args()
    modules = list(dict.fromkeys(options.only.split(",")))
    if unknown := set(modules) - set(MODULES):
        parser.error(f"unknown modules {', '.join(sorted(unknown))}; known: {', '.join(MODULES)}")
    first = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    seeds, end = random.Random(first), time.monotonic() + 60 * options.minutes
    print(f"seed {first}, {options.minutes:g} minutes", flush=True)

    cases: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    repeat: list[str] = []
    for module in itertools.cycle(modules):
        start, seed = time.monotonic(), seeds.randrange(2**32)
        if start > end:
            break
        pytest_of = ["-m", "pytest", str(MODULES[module].relative_to(Path.cwd()))]
        command = [*pytest_of, "--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}"]
        completed, failed, output = run([sys.executable, *command, "-p", "no:cacheprovider"], end)
        cases[module] += completed
        failures[module] += failed
        if failed:
            print(output)
            repeat.append(" ".join(["python", *command]))
        result = f"{completed:7} cases {failed:3} failures {time.monotonic() - start:6.1f} s"
        print(f"{module:20} seed {seed:10} {result}", flush=True)
        if output.endswith("interrupted"):
            break

    print(f"\n{'module':20} {'cases':>9} {'failures':>9}")
    for module in modules:
        print(f"{module:20} {cases[module]:9} {failures[module]:9}")
    print(f"{'all':20} {cases.total():9} {failures.total():9}")
    for command in repeat:
        print(f"repeat: {command}")
    return 1 if failures.total() else 0


if __name__ == "__main__":
    sys.exit(main())
