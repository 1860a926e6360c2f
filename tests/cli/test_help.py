"""Help texts are printed as they were written, and quickly; shells complete; missing packages are named."""

import json
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from calibrant import cli
from tests.cli.commands import fail_at_once, invoke, printed

GROUP = typer.main.get_command(cli.app)


def packed(text):
    """The text without white space, which help texts put where a line ends."""
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("command", GROUP.commands)
def test_help_shows_every_word(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown, found = packed(printed(command, "--help")), GROUP.commands[command]
    assert packed(found.help) in shown
    for parameter in [each for each in found.params if not getattr(each, "hidden", False)]:
        assert packed(parameter.help) in shown, parameter.name
        if parameter.metavar is not None:
            assert packed(parameter.metavar.strip("[]")) in shown, parameter.name
        if isinstance(parameter.default, str | int | float) and parameter.show_default is True:
            assert packed(f"default: {parameter.default}") in shown or parameter.is_flag, parameter.name


def test_the_list_of_commands_shows_every_word(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed("--help")
    for name, command in GROUP.commands.items():
        assert packed(name + command.help.partition("\n\n")[0]) in packed(lines)
    assert max(map(len, lines.splitlines())) <= 80


def test_brackets_in_usage_errors():
    result = invoke("evaluate", "a.npz", "--no[bins]")
    assert result.exit_code == 2
    assert "--no[bins]" in result.stderr


QUICK = """
import json, sys
from calibrant.__main__ import main
sys.argv = ["calibrant", *sys.argv[1:]]
try:
    main()
finally:
    print(json.dumps(sorted({"torch", "numpy", "scipy", "rich"} & set(sys.modules))), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["calibrate", "--help"], []])
def test_help_and_version_import_nothing_heavy(arguments):
    ended = subprocess.run([sys.executable, "-c", QUICK, *arguments], capture_output=True, text=True)
    assert ended.stdout or ended.stderr
    assert json.loads(ended.stderr.splitlines()[-1]) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [("calibrant ev", {"evaluate"}), ("calibrant evaluate --class", {"--class-counts"})],
)
def test_shells_complete_commands_and_options(words, expected):
    environment = {
        "_CALIBRANT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    result = CliRunner().invoke(cli.app, [], env=environment, prog_name="calibrant")
    assert set(result.output.split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_completion(shell):
    environment = {"_CALIBRANT_COMPLETE": f"source_{shell}"}
    result = CliRunner().invoke(cli.app, [], env=environment, prog_name="calibrant")
    assert f"_CALIBRANT_COMPLETE=complete_{shell}" in result.output


def test_the_options_for_completion_are_listed():
    assert {"--install-completion", "--show-completion"} <= set(printed("--help").split())


@pytest.mark.parametrize("command", ["evaluate", "calibrate"])
def test_the_packages_of_a_report_are_checked_first(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    expected = '--report needs matplotlib, which is not installed: pip install "calibrant[report]"'
    assert fail_at_once(command, "missing.npz", "--report", "a.html") == f"calibrant: {expected}"


def test_a_command_without_its_packages_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("calibrant.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    expected = "calibrant: calibrant.training needs lightning_fabric, which is not installed"
    assert fail_at_once("train", "digits") == f'{expected}: pip install "calibrant[train]"'
