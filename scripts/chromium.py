"""A headless Chromium to look at pages with: the DevTools protocol over a pipe, nothing to install.

Debian's chromium is all it needs (scripts/setup_system.sh). Used by tests/browser and by
scripts/screenshots.py.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")


class BrowserError(Exception):
    """The browser did not start, went away, or refused a command; the message says which."""


def find() -> str | None:
    """The browser's path, None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one tab. A context manager: leaving it ends the process.

    Attributes:
        problems: What the pages wrote to the console as errors or warnings, and uncaught
            exceptions.
        requests: Addresses that the pages asked for.
    """

    def __init__(self, executable: str) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._buffer = b""
        self._last_id = 0
        self._profile = tempfile.TemporaryDirectory(prefix="castor-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def descriptors() -> None:  # the protocol speaks on 3 and 4
            # Out of the way first: one of them may be 3 or 4 itself.
            source, target = (os.dup2(fd, fd + 100) for fd in (to_browser, from_browser))
            os.dup2(source, 3)
            os.dup2(target, 4)

        self._process = subprocess.Popen(
            [
                executable,
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",  # CI runs as root; the pages are our own
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-extensions",
                "--disable-background-networking",
                "--disable-component-update",
                "--font-render-hinting=none",
                f"--user-data-dir={self._profile.name}",
            ],
            preexec_fn=descriptors,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile._ignore_cleanup_errors = True  # type: ignore[attr-defined]
        self._profile.cleanup()

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command to the tab and returns its result.

        Raises:
            BrowserError: The command failed, or no answer came within a minute.
        """
        return self._call(method, session=self._session, **arguments)

    def open(self, page: Path, *, width: int, height: int, dark: bool = False) -> None:
        """Loads a file into a viewport of the given size, in CSS pixels, and waits until it did."""
        self.problems.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT_S
        while not self._loaded:
            self._handle(self._receive(deadline))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it is.

        Raises:
            BrowserError: It threw.
        """
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def settle(self) -> None:
        """Waits for two frames: what a scroll or a click set off has happened then."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def move_mouse(self, x: float, y: float) -> None:
        """To a place in the viewport, in CSS pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Presses and releases a key, by its DOM name."""
        codes = {"Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}
        for kind in ("rawKeyDown", "keyUp"):
            code = codes[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, session: str | None = None, **arguments: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": arguments}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._handle(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                state = "did not answer" if not ready else "went away"
                raise BrowserError(f"Chromium {state} (exit status {self._process.poll()})")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _handle(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(details["exceptionDetails"]))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(details["entry"]))
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.problems.append(str(details["args"]))
