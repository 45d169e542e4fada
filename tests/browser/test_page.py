"""The report's page in a real browser: it draws, fits, answers the mouse and the keyboard."""

import json
from pathlib import Path
from typing import Any

import pytest

from chromium import Chromium

pytestmark = pytest.mark.browser

WIDE, NARROW = (1400, 900), (390, 844)
STEP_PLOTS = ("memory", "host", "residency", "transfers", "stalls")
TRAINING_PLOTS = ("loss", "rate", "learning-rate", "gradient-norm")

# How much of a plot's picture is not of one colour, in the paths of its SVG and in its canvas.
INK = """(() => {
  const plot = document.getElementById(%s);
  const canvas = plot.querySelector("canvas");
  const paths = [...plot.querySelectorAll("path")];
  let colours = 0;
  if (canvas) {
    const context = canvas.getContext("2d");
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
    colours = new Set(new Uint32Array(pixels.buffer)).size;
  }
  return [paths.filter((path) => path.getAttribute("d").length > 10).length, colours];
})()"""

# Labels that leave their plot, and labels that lie over each other.
OVERLAPS = """(() => {
  const found = [];
  for (const svg of document.querySelectorAll(".plot svg")) {
    const frame = svg.getBoundingClientRect();
    const labels = [...svg.querySelectorAll("text")].map(
      (text) => ({ name: text.textContent, box: text.getBoundingClientRect() }));
    labels.forEach(({ name, box }, i) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
          box.top < frame.top - 1 || box.bottom > frame.bottom + 1) found.push(`clipped: ${name}`);
      for (const other of labels.slice(i + 1)) {
        if (box.left < other.box.right - 1 && other.box.left < box.right - 1 &&
            box.top < other.box.bottom - 3 && other.box.top < box.bottom - 3) {
          found.push(`${name} over ${other.name} in ${svg.parentNode.id}`);
        }
      }
    });
  }
  return found;
})()"""


def ink(browser: Chromium, plot: str) -> list[int]:
    value: list[int] = browser.evaluate(INK % json.dumps(plot))
    return value


def text_of(browser: Chromium, element: str) -> str:
    return str(browser.evaluate(f"document.getElementById({json.dumps(element)}).textContent"))


def hover(browser: Chromium, plot: str, x: float, y: float) -> str:
    """Moves the mouse to a share of the plot's box; the tooltip's text, empty if there is none."""
    name = json.dumps(plot)
    browser.evaluate(f"document.getElementById({name}).scrollIntoView({{block: 'center'}})")
    browser.settle()
    box = browser.evaluate(
        f"(({{left, top, width, height}}) => [left, top, width, height])"
        f"(document.getElementById({name}).getBoundingClientRect())"
    )
    browser.move_mouse(box[0] + x * box[2], box[1] + y * box[3])
    browser.settle()
    return tooltip(browser)


def tooltip(browser: Chromium) -> str:
    expression = "document.getElementById('tooltip')"
    return str(browser.evaluate(f"{expression}.hidden ? '' : {expression}.innerText"))


def contained(browser: Chromium) -> bool:
    box: Any = browser.evaluate(
        "(({left, top, right, bottom}) => [left, top, innerWidth - right, innerHeight - bottom])"
        "(document.getElementById('tooltip').getBoundingClientRect())"
    )
    return min(box) >= 0


@pytest.mark.parametrize("name", ["streaming", "chunks", "long", "silent"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_every_plot_is_drawn(
    browser: Chromium, pages: dict[str, Path], name: str, dark: bool, viewport: tuple[int, int]
) -> None:
    browser.open(pages[name], width=viewport[0], height=viewport[1], dark=dark)
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith("file:")] == []
    assert len(browser.requests) == 1, "the page is one file"
    plots = {"memory", "residency"} if name == "silent" else {*STEP_PLOTS, *TRAINING_PLOTS}
    for plot in plots:
        shapes, colours = ink(browser, plot)
        assert colours > 3 if plot == "residency" else shapes > 0, plot
    width = browser.evaluate("document.documentElement.scrollWidth")
    assert width == viewport[0], "nothing sticks out"
    assert browser.evaluate(OVERLAPS) == []
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 20, 26)") is dark


def test_plots_say_in_words_what_they_show(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["streaming"], width=WIDE[0], height=WIDE[1])
    for plot in (*STEP_PLOTS, *TRAINING_PLOTS):
        label = browser.evaluate(f"document.getElementById('{plot}').getAttribute('aria-label')")
        assert label, plot
        assert browser.evaluate(f"document.getElementById('{plot}').getAttribute('role')") == "img"
    assert "of a budget of" in browser.evaluate(
        "document.getElementById('memory').getAttribute('aria-label')"
    )


def test_a_step_without_loss_or_optimizer_moves_is_told_in_words(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.open(pages["silent"], width=WIDE[0], height=WIDE[1])
    assert text_of(browser, "loss").startswith("No loss is known")
    assert "samples" in text_of(browser, "rate-title").lower()
    assert browser.evaluate("document.querySelectorAll('#rate circle').length") == 1


def test_a_long_step_is_thinned_and_says_so(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["long"], width=WIDE[0], height=WIDE[1])
    assert browser.evaluate("data.events.time.length") > 20_000
    assert "columns: each shows its highest total" in text_of(browser, "memory-note")
    drawn = browser.evaluate(
        "[...document.querySelectorAll('#memory path')]"
        ".reduce((sum, path) => sum + path.getAttribute('d').length, 0)"
    )
    assert drawn < 500_000
    highest = browser.evaluate(
        "Math.max(...data.samples.slots.map((s, i) => s + data.samples.nonmodel[i]))"
    )
    picked = browser.evaluate(
        "Math.max(...highestPerColumn(400, (i) => data.samples.slots[i] + data.samples.nonmodel[i])"
        ".map((i) => data.samples.slots[i] + data.samples.nonmodel[i]))"
    )
    assert picked == highest, "thinning keeps the peak"


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    ("plot", "expected"),
    [
        ("memory", "left of the budget"),
        ("host", "exp_avg_sq"),
        ("residency", "layers."),
        ("transfers", "to the device"),
        ("stalls", "held up"),
        ("loss", "tokens/s"),
        ("rate", "device peak"),
    ],
)
def test_hovering_names_what_is_there(
    browser: Chromium, pages: dict[str, Path], plot: str, expected: str, viewport: tuple[int, int]
) -> None:
    browser.open(pages["streaming"], width=viewport[0], height=viewport[1])
    assert tooltip(browser) == ""
    for x in (0.3, 0.97):
        assert expected in hover(browser, plot, x, 0.5)
        assert contained(browser)
    assert browser.problems == []


def test_a_chunks_row_names_its_parameters(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["streaming"], width=WIDE[0], height=WIDE[1])
    last = browser.evaluate("data.chunks.length") - 1
    row = hover(browser, "residency", 0.5, 0.86)
    assert f"chunk {last}" in row
    assert "layers.11.weight" in row


def test_arrow_keys_go_through_the_events(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["streaming"], width=WIDE[0], height=WIDE[1])
    browser.evaluate("document.getElementById('memory').focus()")
    browser.settle()
    browser.press("ArrowRight")
    assert "event 1 at" in tooltip(browser)
    browser.press("ArrowRight")
    assert "event 2 at" in tooltip(browser)
    # In either mode, the position of an event leads back to it.
    there_and_back = "events.time.every((time) => axis.time(axis.position(time)) === time)"
    assert browser.evaluate(there_and_back)
    assert browser.evaluate(f"(axis.mode = 'events', {there_and_back})")
    browser.press("Escape")
    assert tooltip(browser) == ""


def test_the_axis_can_be_events(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["streaming"], width=WIDE[0], height=WIDE[1])
    in_time = browser.evaluate("document.querySelector('#memory path').getAttribute('d')")
    browser.evaluate("document.querySelector('#axis [value=events]').click()")
    assert browser.evaluate("document.querySelector('#memory path').getAttribute('d')") != in_time
    assert browser.evaluate(
        "[...document.querySelectorAll('#memory text')].some((t) => t.textContent === 'event')"
    )
    assert browser.evaluate(OVERLAPS) == []
    # The two directions of the axis are inverse to each other.
    assert browser.evaluate(
        "[0, 0.25, 0.5, 0.99].every((p) => Math.abs(axis.position(axis.time(p)) - p) < 1e-3)"
    )
    assert "layers." in hover(browser, "memory", 0.3, 0.5)
    assert browser.problems == []
