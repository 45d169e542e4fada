# Question: do the narrow optimizer state formats train as well as fp32 state does?
# Baseline: format fp32 on the same seed: the same weights to begin with and the same batches, so
#     that losses are compared step by step. split must give the very same losses.
# Model: GPT-2 of 4.2M parameters (4 layers, 256 wide, 4 heads, vocabulary 4096) in bf16, plain
#     PyTorch and the standalone HybridAdam; the text is the Python library's own sources, as
#     in examples/train_gpt.py; batch 4 x 128, lr 1e-3 after 20 steps of warm-up, clipping at 1.0.
"""Convergence of the state formats: `python benchmarks/formats.py [--steps N] [--seeds N]`."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _machine import ROOT, command_line, describe_machine, output_of, write_record
from _plots import COLOURS, Line, Panel, write_panels
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(ROOT / "examples"))
from train_gpt import Batches, Settings, build_model, read_text, tokenise

import castor

FORMATS = ("fp32", "split", "split_bf16", "split_int8")
NARROW = FORMATS[2:]
# Nats by which the mean of a narrow format's last losses may exceed fp32's, averaged over seeds.
TOLERANCE = 0.02
SETTINGS: dict[str, Any] = {
    "layers": 4,
    "width": 256,
    "heads": 4,
    "vocab": 4096,
    "positions": 128,
    "batch": 4,
    "sequence": 128,
    "lr": 1e-3,
    "text_bytes": 2_000_000,
}


QUICK = {"layers": 1, "width": 32, "heads": 2, "vocab": 300, "sequence": 32, "text_bytes": 50_000}
PICTURE = ROOT / "docs" / "images" / "formats.svg"


def train(state_format: str, settings: Settings, tokens: torch.Tensor) -> list[float]:
    """The loss of each step."""
    batches = Batches(tokens, settings)
    model = build_model(settings).to(torch.bfloat16)
    optimizer = castor.HybridAdam(
        model.parameters(),
        lr=settings.lr,
        weight_decay=0.01,
        optim_state_format=state_format,
        seed=settings.seed,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / settings.warmup_steps)
    )
    losses = []
    for step in range(settings.steps):
        loss = model(**batches[step]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def smooth(values: list[float], width: int) -> list[float]:
    """Means of the `width` values up to each."""
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def last(losses: list[float]) -> float:
    """Mean of the last tenth."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def mean_curve(runs: list[list[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*runs, strict=True)]


def summarise(runs: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Of each format: the last losses of its seeds, and their excess over fp32's."""
    summary = {}
    for state_format, losses in runs.items():
        excess = [last(a) - last(b) for a, b in zip(losses, runs["fp32"], strict=True)]
        summary[state_format] = {
            "last_losses": [last(run) for run in losses],
            "excess_over_fp32": excess,
            "mean_excess_over_fp32": statistics.fmean(excess),
        }
    return summary


def failures(runs: dict[str, list[list[float]]], summary: dict[str, Any]) -> list[str]:
    found = []
    if runs["split"] != runs["fp32"]:
        found.append("split does not give the losses of fp32")
    for state_format in NARROW:
        excess = summary[state_format]["mean_excess_over_fp32"]
        if not excess <= TOLERANCE:  # also when it is NaN
            found.append(f"{state_format} ends {excess:.3f} nats above fp32")
    return found


def plot(path: Path, runs: dict[str, list[list[float]]]) -> None:
    steps = len(runs["fp32"][0])
    width = max(1, steps // 20)
    x = [float(step + 1) for step in range(steps)]
    curves = {f: smooth(mean_curve(losses), width) for f, losses in runs.items()}
    colours = dict(zip(FORMATS, COLOURS, strict=False))
    losses = [
        Line(name=f, colour=colours[f], x=x, y=curves[f], dashed=f == "split") for f in FORMATS
    ]
    differences = [
        Line(
            name=f,
            colour=colours[f],
            x=x,
            y=[a - b for a, b in zip(curves[f], curves["fp32"], strict=True)],
            dashed=f == "split",
        )
        for f in FORMATS[1:]
    ]
    about = f"mean of {len(runs['fp32'])} seeds and of the last {width} steps"
    write_panels(
        path,
        [
            Panel(title=f"loss (nats), {about}", x_label="step", lines=losses),
            Panel(title="loss above that of fp32 (nats)", x_label="step", lines=differences),
        ],
    )


def main() -> int:
    parser = command_line("formats", __doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="default: docs/images/formats.svg")
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine() | {"torch_num_threads": torch.get_num_threads()}

    chosen, steps, seeds = SETTINGS, arguments.steps, arguments.seeds
    if arguments.quick:
        chosen, steps, seeds = SETTINGS | QUICK, 2, 1
    tokens = tokenise(read_text(chosen["text_bytes"]), chosen["vocab"])
    start = time.perf_counter()
    runs: dict[str, list[list[float]]] = {state_format: [] for state_format in FORMATS}
    for seed in range(seeds):
        settings = Settings(**chosen, steps=steps, seed=seed)
        for state_format in FORMATS:
            losses = train(state_format, settings, tokens)
            runs[state_format].append(losses)
            console.print(
                f"seed {seed} {state_format:<10} loss {losses[0]:.3f} -> {last(losses):.4f}  "
                f"{time.perf_counter() - start:.0f} s"
            )
    summary = summarise(runs)
    table = Table(title=f"{steps} steps, {seeds} seeds, mean of the last tenth")
    for heading in ("format", "loss", "above fp32"):
        table.add_column(heading)
    for state_format, figures in summary.items():
        table.add_row(
            state_format,
            f"{statistics.fmean(figures['last_losses']):.4f}",
            f"{figures['mean_excess_over_fp32']:+.4f}",
        )
    console.print(table)
    figures = {
        "settings": chosen | {"steps": steps, "seeds": seeds},
        "summary": summary,
        "losses": {f: [[round(v, 5) for v in run] for run in lists] for f, lists in runs.items()},
    }
    write_record(arguments, "formats", figures, machine=machine, indent=None)
    picture = arguments.plot or (
        output_of(arguments, "formats").with_suffix(".svg") if arguments.quick else PICTURE
    )
    plot(picture, runs)
    print(f"written to {picture}")
    broken = failures(runs, summary)
    for line in broken:
        console.print(f"[red]FAILED: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
