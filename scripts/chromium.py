"""A headless Chromium to look at pages with, driven by Playwright.

The browser is the system's (scripts/setup_system.sh). Used by tests/browser and by
scripts/screenshots.py.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import ConsoleMessage, sync_playwright

TIMEOUT_MS = 60_000.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The browser's path, None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one tab. A context manager: leaving it ends the process.

    Attributes:
        problems: What the page wrote to the console as errors or warnings, and uncaught exceptions.
        requests: Addresses that the page asked for.
        page: Playwright's page, for what has no method here.
    """

    def __init__(self, executable: str) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=executable)
        self.page = self._browser.new_page(device_scale_factor=1)
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.close()
        self._playwright.stop()

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def open(self, page: Path | str, *, width: int, height: int, dark: bool = False) -> None:
        """Loads a file or an address into a viewport of the given size, in CSS pixels."""
        self.problems.clear()
        self.requests.clear()
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.goto(page if isinstance(page, str) else page.resolve().as_uri())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it is."""
        return self.page.evaluate(expression)

    def settle(self) -> None:
        """Waits for two frames: what a scroll or a click set off has happened then."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def move_mouse(self, x: float, y: float) -> None:
        """To a place in the viewport, in CSS pixels."""
        self.page.mouse.move(x, y)

    def press(self, key: str) -> None:
        """Presses and releases a key, by its DOM name."""
        self.page.keyboard.press(key)

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as PNG with a palette of 256 colours: in few bytes."""
        shot = Image.open(io.BytesIO(self.page.screenshot(full_page=True))).convert("RGB")
        shot.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
