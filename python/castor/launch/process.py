"""Starts a script in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def start_process(command: Sequence[str]) -> int:
    """Runs a command of Python and waits for its end; forwards signals to it.

    Args:
        command: The script, or -m and a module, and its arguments.

    Returns:
        The exit status for the shell: 128 plus the signal's number if a signal ended it.
    """
    with subprocess.Popen([sys.executable, "-u", *command]) as process:

        def forward_signal(number: int, _: Any) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, forward_signal) for number in _PASSED_ON}
        # The terminal sends Ctrl-C to both; this process waits for the other one.
        before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return status if status >= 0 else 128 - status
