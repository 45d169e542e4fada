"""Every script of benchmarks/ runs with --quick, and what it writes is a page's and status.md's."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import status
from rank_processes import run_python
from status import Row

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py") if path.stem != "page"
)
# Those that take ten seconds and more are left to `make whole`.
LONG = (
    *("activation_peers", "activations", "adam", "beyond", "build", "builds", "checkpoints"),
    *(
        "compiled",
        "copy_engines",
        "expert_guesses",
        "expert_training",
        "experts",
        "export_memory",
        "generation",
        "hybrid",
        "hybrid_parallel",
    ),
    *("io", "layouts", "recipe_data"),
    *("logits", "nvme", "overlap", "pipelines", "sequence_parallel", "step", "sweep", "zero"),
)
# Of benchmarks/cpp; `make cpp` builds them.
PROGRAMS = {
    "adam": "adam",
    "copy_engines": "copy_engines",
    "hooks": "core_events",
    "io": "io_engine",
    "planner": "planner",
}
# Who runs DeepSpeed beside castor, and says so where it is not installed.
WITH_DEEPSPEED = ("adam", "deepspeed_settings", "nvme", "sequence_parallel", "step", "zero")
DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
# Cases that take long: (benchmark, part of the path to a figure).
NOT_QUICK = {
    ("overlap", "42.5M, 1 x 64"),
    ("overlap", "312M, 1 x 64"),
    ("activations", "Llama, 128k vocabulary"),
    ("generation", "GPT-2 312M"),
    ("generation", "Llama 134M"),
}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = ROOT / "benchmarks" / f"{script}.py"
    return run_python(path, *arguments, timeout=600, GOMP_SPINCOUNT="1000", COLUMNS="200")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where quick runs of this module write to."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.parametrize(
    "script",
    [pytest.param(name, marks=pytest.mark.whole if name in LONG else ()) for name in SCRIPTS],
)
def test_a_quick_run_writes_its_figures(script: str, results: Path) -> None:
    program = PROGRAMS.get(script)
    if program is not None and not (ROOT / "build" / "benchmarks" / program).exists():
        pytest.skip(f"build/benchmarks/{program} is not there: make cpp builds it")
    output = results / f"{script}.json"
    # A build is compared with itself.
    site = Path(importlib.util.find_spec("castor").submodule_search_locations[0]).parent
    more = ("--other", str(site)) if script == "builds" else ()
    done = run(script, "--quick", "--output", str(output), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    if script == "gpu" and not output.exists():
        assert "SKIPPED: benchmarks/gpu.py: no CUDA device" in done.stdout
        pytest.skip("gpu.py: torch finds no CUDA device")
    if script in WITH_DEEPSPEED and not DEEPSPEED:
        assert re.search(r"SKIPPED: .*: deepspeed is not installed", done.stdout)
    if script == "io" and shutil.which("fio") is None:
        assert "SKIPPED: fio: it is not installed" in done.stdout
    if script == "deepspeed_settings" and not DEEPSPEED:
        return
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["benchmark"] == script
    assert "--quick" in record["command"]


def test_the_page_shows_the_figures_of_quick_runs(results: Path, tmp_path: Path) -> None:
    if not any(results.iterdir()):
        pytest.skip("no quick run before this test")
    done = run("page", "--results", str(results), "--output", str(tmp_path / "index.html"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    for path in results.glob("*.json"):
        assert f'id="{path.stem}"' in text


def can_be_there(row: Row) -> bool:
    """Whether a quick run on this machine has what the row shows."""
    parts = [str(part) for part in row.path]
    if any(peer in part for part in parts for peer in ("zero2", "zero3", "deepspeed")):
        return DEEPSPEED
    if row.benchmark == "io":
        return shutil.which("fio") is not None
    return not any((row.benchmark, part) in NOT_QUICK for part in parts)


def test_quick_runs_write_the_figures_of_the_status_page(results: Path) -> None:
    for row in status.ROWS:
        path = results / f"{row.benchmark}.json"
        if not path.exists() or not can_be_there(row):
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        try:
            found = status.found(record, row.path)
        except (KeyError, IndexError, TypeError):
            found = []
        assert found, f"{row.benchmark}: a quick run has no {row.path}"
        assert None not in found, f"{row.benchmark}: nothing at {row.path}"


@pytest.mark.whole
def test_contenders_of_the_gpu_benchmark_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, as far as they run there: DeepSpeed's are left to a GPU."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    session = importlib.import_module("_gpu_session")
    monkeypatch.setattr(session, "DEVICE", "cpu")
    load = session.Load(width=128, layers=2, tokens=session.SEQUENCE, steps=1)
    found = {}
    try:
        for name, make in session.CONTENDERS.items():
            if not name.startswith("deepspeed"):
                step, _ = make(load)
                losses = [step(i).item() for i in range(3)]
                found[name] = {"seconds": [1.0], "median_seconds": 1.0, "losses": losses}
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    session.compare(found)
    assert {"resident", "castor_streamed", "castor_auto", "fsdp2_offload"} <= set(found)
    assert [one["error"] for one in found.values() if "error" in one] == []
    assert max(one["loss_difference"] for one in found.values()) < 1e-4


def test_no_committed_figure_is_of_a_quick_run() -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        assert "--quick" not in json.loads(path.read_text(encoding="utf-8"))["command"], path
