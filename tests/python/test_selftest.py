"""python -m castor.selftest: passes here, and says so when something is wrong."""

import subprocess
import sys
from io import StringIO

import pytest
import torch
from rich.console import Console

from castor import selftest


def test_selftest_passes_without_warnings_and_without_transformers() -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules['transformers'] = sys.modules['pytest'] = None\n"
        "runpy.run_module('castor.selftest', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\nok ") == len(selftest.CHECKS)
    assert torch.__version__ in done.stdout
    assert "castor selftest: passed" in done.stdout


def test_failing_check_is_shown_fails_the_run_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> str:
        raise selftest.SelfTestError("losses [differ]")

    monkeypatch.setattr(selftest, "CHECKS", {"one": broken, "two": lambda: "fine"})
    text = StringIO()
    assert not selftest.run(Console(file=text, width=200))
    assert "FAILED one" in text.getvalue()
    assert "SelfTestError: losses [differ]" in text.getvalue()
    assert "two" in text.getvalue()
    assert selftest.main() == 1


def test_training_check_sees_a_wrong_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(selftest.HybridAdam):
        def __init__(self, params: object, *, lr: float) -> None:
            super().__init__(params, lr=2 * lr)  # type: ignore[arg-type]

    monkeypatch.setattr(selftest, "HybridAdam", Wrong)
    with pytest.raises(selftest.SelfTestError, match="losses differ"):
        selftest.check_training()
