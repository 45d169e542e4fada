"""Takes the screenshots of docs/images: the report of a short training run, in a headless Chromium.

Usage: screenshots.py FOLDER. Writes report-{wide,narrow}-{light,dark}.png.
"""

import sys
import tempfile
from pathlib import Path

from chromium import Chromium, find

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import train_gpt

import castor

VIEWPORTS = {"wide": (1400, 900), "narrow": (390, 844)}
MAX_BYTES = 200_000
SETTINGS = train_gpt.Settings(
    layers=12, width=256, vocab=2048, sequence=64, steps=40, text_bytes=400_000
)


def write_page(path: Path) -> None:
    """Trains in the demo's share of the memory and writes the report."""
    text = train_gpt.read_text(SETTINGS.text_bytes)
    batches = train_gpt.Batches(train_gpt.tokenise(text, SETTINGS.vocab), SETTINGS)
    probe = train_gpt.Settings(**{**vars(SETTINGS), "steps": train_gpt.PROBE_STEPS})
    nonmodel = train_gpt.train(probe, batches, device_memory="1GiB").peak_nonmodel_bytes
    budget = train_gpt.tight_budget(train_gpt.build_model(SETTINGS), nonmodel, train_gpt.SHARE)
    run = train_gpt.train(SETTINGS, batches, device_memory=budget)
    castor.report.write_html(path, run.boosted)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    executable = find()
    if executable is None:
        print("chromium is not installed; run: apt-get install chromium", file=sys.stderr)
        return 1
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, Chromium(executable) as browser:
        page = Path(scratch) / "report.html"
        write_page(page)
        for name, (width, height) in VIEWPORTS.items():
            for dark in (False, True):
                browser.open(page, width=width, height=height, dark=dark)
                if browser.problems:
                    print(f"the page has problems: {browser.problems}", file=sys.stderr)
                    return 1
                shot = folder / f"report-{name}-{'dark' if dark else 'light'}.png"
                browser.screenshot(shot)
                size = shot.stat().st_size
                print(f"{shot}: {size:,} bytes")
                if size > MAX_BYTES:
                    print(f"{shot} is larger than {MAX_BYTES:,} bytes", file=sys.stderr)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
