"""The castor command: it starts, lists its sub-commands, and turns refusals into one line."""

import subprocess
import sys
from pathlib import Path

import pytest

import castor
from castor import cli


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -W error -m castor` with the arguments."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "castor", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_version_is_that_of_the_package() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"castor {castor.__version__}\n")


def test_help_names_the_sub_commands_without_transformers() -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules['transformers'] = sys.modules['lm_eval'] = None\n"
        "sys.argv = ['castor', '--help']\n"
        "runpy.run_module('castor', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "selftest" in done.stdout


def test_an_error_of_the_core_is_one_line_where_only_the_extension_is_imported(
    tmp_path: Path,
) -> None:
    done = run("io-bench", str(tmp_path / "missing"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"Create the directory {tmp_path / 'missing'}" in done.stderr


def test_an_unknown_sub_command_is_wrong_usage() -> None:
    done = run("estimat")
    assert done.returncode == 2
    assert "estimat" in done.stderr


def test_what_castor_refuses_is_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("budget is [red]; it must be a size")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert shown.err == "castor: error: budget is [red]; it must be a size\n"
    assert shown.out == ""
