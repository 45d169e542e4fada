"""The page of `make bench`: whole, self-contained, and each figure with where it comes from."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
MACHINE: dict[str, Any] = {
    "cpu": "A <fast> one",
    "num_cpus": 2,
    "memory_bytes": 24 << 30,
    "load_average_1min": 0.25,
    "kernel": "6.1",
    "python": "3.11.7",
    "versions": {"torch": "2.11.0", "deepspeed": None},
    "commit": "0123abcd",
    "uncommitted_changes": True,
    "date": "2026-01-01T00:00:00+00:00",
}


def render(results: Path, output: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "page.py"
    command = [sys.executable, "-W", "error", str(script), "--results", str(results)]
    return subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, check=False
    )


def test_page_shows_every_committed_result_with_its_origin(tmp_path: Path) -> None:
    page = tmp_path / "bench" / "index.html"
    done = render(ROOT / "benchmarks" / "results", page)
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert RECORDS
    for path in RECORDS:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert f'id="{record["benchmark"]}"' in text
        assert " ".join(record["command"]) in text
        assert record["machine"]["commit"] in text
    assert "<svg" in text
    assert re.findall(r"https?:|<script|<link|<img|url\(", text) == []


def test_page_shows_numbers_of_a_benchmark_it_does_not_know(tmp_path: Path) -> None:
    record = {
        "benchmark": "new",
        "command": ["new.py", "--size", "3"],
        "machine": MACHINE,
        "results": {"<b>": {"seconds": 1.25}, "met": True},
    }
    (tmp_path / "new.json").write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "index.html"
    done = render(tmp_path, page)
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert "<td>results, &lt;b&gt;, seconds</td><td>1.25</td>" in text
    assert "A &lt;fast&gt; one, 2 cores, 24 GiB" in text
    assert "commit 0123abcd with uncommitted changes" in text
    assert "python benchmarks/new.py --size 3" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no results"), ('{"benchmark": "new"}', "is no record of a benchmark")],
)
def test_page_refuses_what_is_no_result(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "new.json").write_text(content, encoding="utf-8")
    done = render(tmp_path, tmp_path / "index.html")
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "index.html").exists()
