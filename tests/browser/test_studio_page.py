"""castor studio in a real browser, from an empty folder: upload, preview, train, chat, deploy."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import expect

import small_model
from castor.recipes.studio_jobs import Workspace
from chromium import Chromium

pytestmark = pytest.mark.browser

SECONDS = 240
"""Longest wait for a command: each imports torch, on cores that others may use."""
STEPS = 20
CHANGES = {
    "max_length: 256": "max_length: 128",
    "  epochs: 1 ": f"  max_steps: {STEPS} ",
    "gradient_accumulation: 8": "gradient_accumulation: 1",
    "learning_rate: 2.0e-05": "learning_rate: 1.0e-02",
    "precision: bf16": "precision: fp32\n  device: cpu\n  device_memory: 6MiB\n  "
    "host_memory: 256MiB",
    "every: 10 ": "every: 1 ",
}
EXPECTED = (
    # gradio's plots name another version of Vega-Lite than it brings, and it writes this when a
    # stream of events ends.
    "WARN The input spec uses Vega-Lite",
    "Method not implemented.",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    yield home
    for job in Workspace.at(home / "castor-studio").jobs():
        job.stop()


@contextmanager
def studio(home: Path) -> Iterator[str]:
    """Runs castor studio, and gives the address that it prints."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_DATASETS")
    }
    environment |= {"HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "castor", "studio", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            said = next(line for line in process.stderr if "token" in line)
            found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", said)
            assert found
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield found[0]
        finally:
            process.terminate()
            process.wait(30)


def open_tab(browser: Chromium, name: str) -> None:
    """Opens a tab, which a narrow page keeps in a menu."""
    page = browser.page
    tab = page.get_by_role("tab", name=name, exact=True).first
    if page.viewport_size and page.viewport_size["width"] < 700:
        menu = page.locator(".overflow-menu > button").first
        expect(menu).to_be_visible()
        if not tab.is_visible():
            menu.click()
            tab = page.locator(".overflow-dropdown button", has_text=name)
    tab.click()


def press(browser: Chromium, name: str) -> None:
    browser.page.get_by_role("button", name=name).and_(browser.page.locator(":visible")).click()


def test_from_an_upload_to_a_served_model(browser: Chromium, home: Path) -> None:
    place = small_model.make(home / "place")
    workspace = home / "castor-studio"
    page, seconds = browser.page, SECONDS * 1000
    with studio(home) as address:
        browser.open(address, width=1280, height=900)
        expect(page.get_by_text("Workspace:")).to_be_visible()
        assert "token" not in page.url
        page.locator("input[type=file]").first.set_input_files(place / "chats.jsonl")
        expect(page.locator("#data-rows")).to_contain_text("bytes in all")

        open_tab(browser, "Recipe")
        expect(page.get_by_label("Data").last).to_have_value("data/chats.jsonl")
        page.locator("#new-model input").fill(str(place / "model"))
        page.keyboard.press("Enter")
        press(browser, "Create (castor init)")
        editor = page.locator("#recipe .cm-content")
        expect(editor).to_contain_text("broken_rows", timeout=seconds)
        text = (workspace / "recipes" / "sft.yaml").read_text()
        for before, after in CHANGES.items():
            assert before in text
            text = text.replace(before, after)
        editor.click()
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(text)
        press(browser, "Show rows (castor data show)")
        rows = page.locator("#recipe-output")
        expect(rows).to_contain_text("the loss counts", timeout=seconds)
        assert rows.locator(".counted").count() > 0
        press(browser, "Plan (castor train --dry-run)")
        expect(rows).to_contain_text("of a budget of 6.0 MiB", timeout=seconds)
        assert (workspace / "recipes" / "sft.yaml").read_text() == text

        open_tab(browser, "Train")
        expect(page.locator("#train-recipe input")).to_have_value("recipes/sft.yaml")
        press(browser, "Start or resume (castor train)")
        expect(page.locator("#train-state")).to_contain_text("Running")
        page.goto("about:blank")
    with studio(home) as address:  # the run has gone on meanwhile
        browser.open(address, width=1280, height=900)
        open_tab(browser, "Train")
        done = f"Finished: step {STEPS} of {STEPS}, loss "
        expect(page.locator("#train-state")).to_contain_text(done, timeout=seconds)
        expect(page.locator(".vega-embed:visible")).to_have_count(5)
        losses = [
            entry["loss"]
            for line in (workspace / "runs" / "sft" / "log.jsonl").read_text().splitlines()
            if "loss" in (entry := json.loads(line))
        ]
        assert len(losses) == STEPS

        open_tab(browser, "Chat")
        expect(page.locator("#chat-model input")).to_have_value("runs/sft")
        options = page.locator("#chat-options textarea, #chat-options input").first
        expect(options).to_have_value("--device cpu --device-memory 6MiB --host-memory 256MiB")
        page.locator("#message textarea").fill("What is a chunk?")
        page.locator("#message button").click()
        kept = workspace / "chats" / "runs_sft.json"
        wait_for(kept.is_file)
        answer = json.loads(kept.read_text())[1]["content"]
        assert answer
        begin = re.findall(r"\w+", answer)[:3]
        talk = page.locator("#talk .bot")  # which gets the last words behind the file
        wait_for(lambda: re.findall(r"\w+", talk.inner_text())[:3] == begin)

        open_tab(browser, "Deploy")
        press(browser, "Stop")
        page.get_by_label("Port").fill("0")
        page.get_by_label("API key").fill("sesame")
        expect(page.locator("#deploy-model input")).to_have_value("runs/sft")
        press(browser, "Deploy (castor serve)")
        output = page.locator("#deploy-output")
        expect(output).to_contain_text("with a key", timeout=seconds)
        found = re.search(r"sft at (http://\S+/v1), with", output.inner_text())
        assert found
        request = urllib.request.Request(f"{found[1]}/models")
        request.add_header("Authorization", "Bearer sesame")
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["data"][0]["id"] == "sft"
        assert "sesame" not in "".join(
            file.read_text() for file in (workspace / "jobs").rglob("*") if file.is_file()
        )

        origin = address.partition("?")[0]
        own = (origin, "data:", "blob:")
        assert [one for one in browser.requests if not one.startswith(own)] == []
        assert [one for one in browser.problems if not one.startswith(EXPECTED)] == []
        look_at_every_tab(browser, origin)


def look_at_every_tab(browser: Chromium, origin: str) -> None:
    """Checks that nothing sticks out, wide and narrow; CASTOR_SCREENSHOTS keeps pictures."""
    folder = os.environ.get("CASTOR_SCREENSHOTS")
    for width in (1280, 400):
        for dark in (False, True):
            browser.open(origin, width=width, height=900, dark=dark)
            expect(browser.page.get_by_text("Workspace:")).to_be_visible()
            for tab in (
                "Data",
                "Model",
                "Recipe",
                "Train",
                "Chat",
                "Compare",
                "Deploy",
                "Commands",
            ):
                open_tab(browser, tab)
                expect(
                    browser.page.get_by_role("tabpanel")
                    .and_(browser.page.locator(":visible"))
                    .first
                ).to_be_visible()
                if folder:
                    time.sleep(1.5)
                    browser.screenshot(
                        Path(folder) / f"{tab}-{width}-{'dark' if dark else 'light'}.png"
                    )
                scroll = browser.evaluate("document.documentElement.scrollWidth")
                assert scroll == width, tab


def wait_for(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)
