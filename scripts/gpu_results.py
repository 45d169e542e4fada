"""A pytest plugin for gpu_check.py: tells what happens to each test, as it happens.

One JSON object a line goes to the file descriptor CASTOR_EVENTS_FD: {"event": "planned", "count"},
{"event": "start", "test"}, {"event": "finish", "test", "outcome", "seconds", "error", ...} and
{"event": "restart", "reason"}. Tests that CASTOR_FINISHED, a JSON file, lists are left out.

After a failure it asks whether the process's CUDA context still answers. An illegal address ends a
context for good, and every later test would fail for nothing: the session then stops, and gpu_check
goes on with the next test in a new process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ERROR_CHARACTERS = 4000
_running: dict[str, dict[str, Any]] = {}


def _tell(**event: Any) -> None:
    os.write(int(os.environ["CASTOR_EVENTS_FD"]), (json.dumps(event) + "\n").encode())


def _context_lost() -> str | None:
    """What a dead CUDA context says; None if it lives, or if there is none."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has a result."""
    finished = set(json.loads(Path(os.environ["CASTOR_FINISHED"]).read_text(encoding="utf-8")))
    left_out = [item for item in items if item.nodeid in finished]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in finished]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be collected is a failed test of its name."""
    if report.failed:
        error = report.longreprtext[-ERROR_CHARACTERS:]
        _tell(event="finish", test=report.nodeid, outcome="failed", seconds=0.0, error=error)


def pytest_collection_finish(session: pytest.Session) -> None:
    _tell(event="planned", count=len(session.items))


def pytest_runtest_logstart(nodeid: str) -> None:
    _running[nodeid] = {"outcome": "passed", "seconds": 0.0, "error": ""}
    _tell(event="start", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Sums up set-up, call and tear-down."""
    result = _running[report.nodeid]
    result["seconds"] += report.duration
    result |= dict(report.user_properties)
    if report.failed:
        result["outcome"] = "failed"
        crash = getattr(report.longrepr, "reprcrash", None)
        message = getattr(crash, "message", "").split("\n")[0]
        said = report.longreprtext[-ERROR_CHARACTERS:]
        result["error"] = f"{report.when}: {said}\n{message}".strip()
    elif report.skipped and result["outcome"] == "passed":
        result["outcome"] = "skipped"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        result["error"] = str(reason).removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Tells the result, and stops where nothing after it could pass."""
    done = yield
    result = _running.pop(item.nodeid)
    result["seconds"] = round(result["seconds"], 3)
    _tell(event="finish", test=item.nodeid, **result)
    lost = _context_lost() if result["outcome"] == "failed" else None
    if lost is not None:
        _tell(event="restart", reason=lost)
        item.session.shouldstop = f"the CUDA context is gone: {lost}"
    return done
