"""What castor train says: budgets that it chose, lines or a live view, and other loggers."""

import contextlib
import importlib.util
import io
import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from castor.config.memory import host_memory, usable_bytes
from castor.recipes import budgets, progress, train
from castor.recipes.budgets import with_budgets
from castor.recipes.recipe import Recipe, RecipeError, dump, load

RECIPE = """\
model: {{path: {place}/model}}
data: {{train: {place}/chats.jsonl, held_out: 2, max_length: 64, packing: false}}
method: {{name: sft, adapter: lora}}
train: {{max_steps: 3, batch_size: 1}}
{memory}
log: {{every: 1}}
output: {{dir: {run}}}
"""


def recipe_file(place: Path, run: Path, memory: str = "") -> Path:
    file = run.with_suffix(".yaml")
    file.write_text(RECIPE.format(place=place, memory=memory, run=run))
    return file


# -- budgets


@pytest.mark.parametrize("memory", ["", "memory: auto", "memory: {}"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_budgets_that_are_left_out_are_what_is_free_and_are_said(
    place: Path, tmp_path: Path, memory: str, nproc: int
) -> None:
    file = recipe_file(place, tmp_path / "run", memory)
    recipe = load(file, ["memory.device=cpu", f"parallel.nproc={nproc}"])
    chosen, said = with_budgets(recipe, tmp_path / "run")
    sizes = {name: chosen.memory[name] for name in ("device_memory", "host_memory")}
    assert said == (
        f"device_memory {sizes['device_memory']} and host_memory {sizes['host_memory']}, "
        "chosen from what is free on cpu"
    )
    device, host = (int(size.removesuffix("MiB")) << 20 for size in sizes.values())
    usable = usable_bytes(host_memory().available_bytes)
    assert nproc * (device + host) == pytest.approx(usable, rel=0.2)  # others take memory too
    assert device == pytest.approx(host / 3, rel=0.01)
    assert chosen.memory["precision"] == "bf16"


def test_a_budget_that_is_given_stays(place: Path, tmp_path: Path) -> None:
    both = "memory: {device: cpu, device_memory: 6MiB, host_memory: 64MiB}"
    recipe = load(recipe_file(place, tmp_path / "run", both))
    assert with_budgets(recipe, tmp_path / "run") == (recipe, None)
    one = load(recipe_file(place, tmp_path / "run", "memory: {device: cpu, device_memory: 6MiB}"))
    chosen, said = with_budgets(one, tmp_path / "run")
    assert chosen.memory["device_memory"] == "6MiB"
    assert said is not None
    assert said.startswith("host_memory ")


def test_a_run_goes_on_in_the_budgets_that_it_began_with(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = load(recipe_file(place, run, "memory: auto"))
    run.mkdir()
    kept = recipe.model_copy(
        update={"memory": {**recipe.memory, "device_memory": "7MiB", "host_memory": "70MiB"}}
    )
    (run / "recipe.yaml").write_text(dump(kept))
    chosen, said = with_budgets(recipe, run)
    assert chosen == load(run / "recipe.yaml")
    assert said == "device_memory 7MiB and host_memory 70MiB, as the run began"


def test_another_word_than_auto_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="line 5: memory: give arguments of GeminiPlugin"):
        load(recipe_file(place, tmp_path / "run", "memory: automatic"))


def test_ranks_share_a_gpu_or_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from castor.plugins import machine

    def free(device: torch.device, *given: Any, ranks: int) -> tuple[int, int]:
        return 100 - 10 * (device.index or 0), 600 // ranks

    monkeypatch.setattr(machine, "choose_budgets", free)
    monkeypatch.setattr(machine, "choose_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    for count, expected in ((1, (50, 300)), (2, (90, 300)), (8, (90, 300))):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        found, name = budgets.measured({}, 2)
        assert (found["device_memory"], found["host_memory"], name) == (*expected, "a GPU")


# -- lines and the live view


def state(step: int, of: int = 4) -> Any:
    return SimpleNamespace(global_step=step, max_steps=of, is_world_process_zero=True)


def told(file: Path, console: Console, logs: Sequence[dict[str, float]]) -> None:
    """Tells of a training whose steps have these entries of a Trainer's log."""
    reporter = progress.Reporter(file, console)
    reporter.on_train_begin(SimpleNamespace(world_size=1), state(0), None)
    for step, entry in enumerate(logs, 1):
        reporter.on_step_end(None, state(step), None)
        reporter.on_log(None, state(step), None, logs=entry)
    reporter.on_train_end(None, state(len(logs)), None)


ENTRIES: list[dict[str, float]] = [
    {"loss": 2.5, "grad_norm": 1.25, "learning_rate": 1e-4, "epoch": 0.1},
    {
        "eval_loss": 2.25,
        "eval_runtime": 0.5,
        "eval_samples_per_second": 3.0,
        "eval_num_tokens": 3e4,
    },
    {"train_runtime": 61.2, "train_loss": 2.5},
]
OF_CASTOR = {
    "device_bytes": 3 << 20, "device_budget_bytes": 4 << 20, "host_bytes": 9 << 20,
    "nvme_bytes": 0, "tokens_per_second": 1234.5,
}  # fmt: skip


def test_entries_are_lines_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_of_castor", lambda ranks: dict(OF_CASTOR))
    out = io.StringIO()
    told(tmp_path / "log.jsonl", Console(file=out, soft_wrap=True), ENTRIES)
    first, second, third = out.getvalue().splitlines()
    assert re.fullmatch(
        r"step 1/4  loss 2\.5  grad_norm 1\.25  lr 0\.0001  tokens/s 1,234  "
        r"device 3\.0 MiB of 4\.0  host 9\.0 MiB  left 0:00:0\d",
        first,
    )
    assert second == "step 2/4  eval_loss 2.25"
    assert third == "step 3/4  trained in 0:01:01  mean loss 2.5"
    written = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [one["step"] for one in written] == [1, 2, 3]
    assert written[0].items() >= {**OF_CASTOR, **ENTRIES[0], "of_steps": 4}.items()


def test_other_ranks_say_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    reporter = progress.Reporter(tmp_path / "log.jsonl", Console(file=out, force_terminal=True))
    other = SimpleNamespace(global_step=1, max_steps=4, is_world_process_zero=False)
    reporter.on_train_begin(SimpleNamespace(world_size=2), other, None)
    reporter.on_step_end(None, other, None)
    reporter.on_log(None, other, None, logs=ENTRIES[0])
    assert out.getvalue() == ""
    assert not (tmp_path / "log.jsonl").exists()


def in_terminal(command: Sequence[str]) -> tuple[int, str]:
    """Runs a command whose standard output is a terminal of 150 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux's end of a terminal
                break
            shown += piece
        os.close(ours)
    return process.returncode, shown.decode()


@pytest.mark.slow
def test_a_terminal_has_a_live_view_of_the_last_step(place: Path, tmp_path: Path) -> None:
    memory = "memory: {precision: fp32, device: cpu, device_memory: 6MiB, host_memory: 64MiB}"
    file = recipe_file(place, tmp_path / "run", memory)
    status, shown = in_terminal([sys.executable, "-m", "castor", "train", str(file)])
    assert status == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    frames = [frame for frame in re.split(r"[\r\n]+", plain) if "/3 ━" in frame]
    assert frames[0].startswith("0/3")
    last = frames[-1]
    assert re.search(
        r"^3/3 ━+ +loss \d\.\d+  grad_norm [\d.]+  tokens/s [\d,]+  "
        r"device \d\.\d MiB of 6\.0  host \d+\.\d MiB  left 0:00:00 *$",
        last,
    ), last
    assert "\x1b[?25l" in shown  # the cursor is hidden meanwhile
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "step 1/3  loss" not in plain  # the view has it
    assert "step 3/3  eval_loss " in plain
    assert "step 3/3  trained in 0:00:" in plain


# -- other loggers


def recipe_that_logs(place: Path, run: Path, name: str) -> Recipe:
    memory = "memory: {precision: fp32, device: cpu, device_memory: 6MiB, host_memory: 64MiB}"
    return load(recipe_file(place, run, memory), [f"log.to=[{name}]"])


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_logger_that_is_not_installed_is_named_before_anything_is_loaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda one, *more: None if one == name else find(one, *more)
    )
    file = tmp_path / "logs.yaml"
    file.write_text(dump(recipe_that_logs(place, tmp_path / "run", name)))
    said = f"log.to: {name} needs {name}: pip install {name}, or leave it out"
    with pytest.raises(ModuleNotFoundError, match=re.escape(said)):
        train.start(file, [], dry_run=True)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard_gets_the_figures(place: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    file = tmp_path / "logs.yaml"
    file.write_text(dump(recipe_that_logs(place, run, "tensorboard")))
    assert train.start(file, [], dry_run=False) == 0
    [events] = run.rglob("events.out.tfevents.*")
    found = EventAccumulator(str(events.parent))
    found.Reload()
    logged = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    expected = [(one["step"], one["loss"]) for one in logged if "loss" in one]
    losses = [(one.step, one.value) for one in found.Scalars("train/loss")]
    assert losses == [(step, pytest.approx(loss)) for step, loss in expected]
    assert len(losses) == 3


@pytest.mark.slow
def test_trackio_gets_the_figures_in_a_file_of_this_machine(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run, kept = tmp_path / "run", tmp_path / "trackio"
    file = tmp_path / "logs.yaml"
    file.write_text(dump(recipe_that_logs(place, run, "trackio")))
    done = subprocess.run(
        [sys.executable, "-m", "castor", "train", str(file)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "TRACKIO_DIR": str(kept), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [database] = kept.glob("*.db")
    with contextlib.closing(sqlite3.connect(database)) as opened:
        found = [json.loads(row[0]) for row in opened.execute("SELECT metrics FROM metrics")]
    own = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in own if "loss" in entry]
    assert len(losses) == 3
    assert [entry["train/loss"] for entry in found if "train/loss" in entry] == losses
