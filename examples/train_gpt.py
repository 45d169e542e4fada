"""Trains a GPT-2 on the sources of Python's standard library, inside a device budget.

python examples/train_gpt.py --device-memory 320MiB    castor, with a budget of your choice
python examples/train_gpt.py --plain                   the same run without castor
python examples/train_gpt.py --demo                    both, at less than half of the device memory

The model is Hugging Face's, built from a configuration and not touched. The demo measures what
activations need, leaves 40% of the parameters' bytes beside them, trains with castor in that budget
and then without castor, compares the two and exits with 1 if castor passed its budget, if the
losses differ, or if the model did not learn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: model and text are made here

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from castor import Booster, GeminiPlugin, report
from castor.config import parse_bytes

MIB = 2**20
MAX_NORM = 1.0
SHARE = 0.4  # of the parameters' bytes that the demo's budget leaves beside the activations
PROBE_STEPS = 3
FIRST_LOSS_TOLERANCE = 1e-5  # relative; the arithmetic of the first forward is the same
LAST_LOSSES_TOLERANCE = 1e-3  # relative, of the mean of the last steps: rounding differs and grows
NEEDED_FALL = 1.0  # nats between the means of the first and the last steps


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run."""

    layers: int = 12
    width: int = 512
    heads: int = 8
    vocab: int = 8192
    positions: int = 1024
    batch: int = 2
    sequence: int = 128
    steps: int = 20
    warmup_steps: int = 5
    lr: float = 3e-4
    seed: int = 0
    precision: str = "fp32"
    text_bytes: int = 4_000_000


def read_text(limit_bytes: int) -> str:
    """The standard library's own modules, in alphabetical order, up to `limit_bytes`."""
    parts, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts.append(text)
        total += len(text)
        if total >= limit_bytes:
            break
    return "".join(parts)[:limit_bytes]


def tokenise(text: str, vocab: int) -> torch.Tensor:
    """Trains a byte-level BPE on `text` and applies it; the same text gives the same tokens.

    Returns:
        int64, shape (number of tokens,), values below `vocab`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = text.splitlines(keepends=True)
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False),
    )
    encoded = tokenizer.encode_batch(lines)
    return torch.tensor([token for line in encoded for token in line.ids])


class Batches:
    """Batch i is a pure function of the seed and i: every run sees the same ones."""

    def __init__(self, tokens: torch.Tensor, settings: Settings) -> None:
        self._tokens = tokens
        self._settings = settings

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        s = self._settings
        generator = torch.Generator().manual_seed(s.seed * 1_000_003 + step)
        starts = torch.randint(len(self._tokens) - s.sequence, (s.batch,), generator=generator)
        ids = torch.stack([self._tokens[start : start + s.sequence] for start in starts.tolist()])
        return {"input_ids": ids, "labels": ids}


def build_model(settings: Settings) -> GPT2LMHeadModel:
    """The same weights for the same seed."""
    torch.manual_seed(settings.seed)
    config = GPT2Config(
        vocab_size=settings.vocab,
        n_positions=settings.positions,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


def param_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def largest_module_bytes(model: nn.Module) -> int:
    """Bytes of the parameters of the module that directly owns most."""
    return max(
        sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
        for module in model.modules()
    )


def tight_budget(model: nn.Module, nonmodel_bytes: int, share: float) -> int:
    """tight(share): the activations' peak, and beside it room for that share of the parameters."""
    chunks = max(share * param_bytes(model), 2.2 * largest_module_bytes(model))
    return nonmodel_bytes + int(chunks)


def plain_bytes(model: nn.Module, nonmodel_bytes: int) -> int:
    """What plain fp32 training holds: parameters, gradients, two moments and activations."""
    return 4 * param_bytes(model) + nonmodel_bytes


@dataclass(kw_only=True)
class Run:
    """What came of one training run; castor's figures are None without castor."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    peak_device_bytes: int | None = None
    peak_nonmodel_bytes: int | None = None
    budget_bytes: int | None = None
    host_bytes: int | None = None
    boosted: nn.Module | None = None
    """What the report is written of: it reads a model, which has to be there still."""

    def tokens_per_second(self, settings: Settings) -> float:
        """Of the median step."""
        return settings.batch * settings.sequence / statistics.median(self.seconds)


Show = Callable[[Run, "Booster | None", int], None]


def train(
    settings: Settings,
    batches: Batches,
    *,
    device_memory: int | str | None,
    show: Show | None = None,
) -> Run:
    """Trains from the seed. `device_memory` None: plain PyTorch.

    Args:
        settings: Of the run.
        batches: Its data.
        device_memory: castor's budget, as GeminiPlugin takes it.
        show: Called after every step with the run so far, the booster and the device bytes that
            the forward pass left in use.
    """
    model = build_model(settings)
    # Plain training gets PyTorch's fastest AdamW; castor runs its own for whichever it is given.
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / settings.warmup_steps)
    )
    # With either, the loop below clips; but fp16 gradients carry a loss scale until castor's step.
    castor_clips = device_memory is not None and settings.precision == "fp16"
    booster = None
    if device_memory is not None:
        plugin = GeminiPlugin(
            device="cpu",
            device_memory=device_memory,
            precision=settings.precision,
            max_norm=MAX_NORM if castor_clips else 0.0,
        )
        booster = Booster(plugin=plugin)
        model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)

    run = Run(boosted=model if booster else None)
    for step in range(settings.steps):
        start = time.perf_counter()
        loss = model(**batches[step]).loss
        device_bytes = booster.memory().device_bytes if booster else 0
        if booster:
            booster.backward(loss, optimizer)
        else:
            loss.backward()
        if not castor_clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - start)
        if booster:
            figures = booster.report()
            run.peak_device_bytes = figures.peak_device_bytes
            run.peak_nonmodel_bytes = figures.peak_nonmodel_bytes
            run.budget_bytes = figures.device_budget_bytes
            run.host_bytes = figures.host_bytes
        if show:
            show(run, booster, device_bytes)
    return run


def mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.1f} MiB"


class ProgressLine:
    """A progress line on a terminal; a line every tenth of the run anywhere else."""

    def __init__(self, console: Console, title: str, settings: Settings) -> None:
        self._settings = settings
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description:<6}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._title = title
        self._task = self._progress.add_task(title, total=settings.steps, figures="")

    def __enter__(self) -> Show:
        self._progress.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self, run: Run, booster: Booster | None, device_bytes: int) -> None:
        recent = Run(seconds=run.seconds[-10:])
        figures = (
            f"loss {run.losses[-1]:6.3f}  {recent.tokens_per_second(self._settings):5.0f} tok/s"
        )
        if booster:
            figures += (
                f"  device {device_bytes / MIB:.0f} (peak {run.peak_device_bytes / MIB:.0f})"
                f" of {run.budget_bytes / MIB:.0f} MiB  host {run.host_bytes / MIB:.0f} MiB"
            )
        done = len(run.losses)
        self._progress.update(self._task, completed=done, figures=figures)
        if not self._console.is_terminal and done % max(1, self._settings.steps // 10) == 0:
            self._console.print(f"{self._title:<6} {done:>4}/{self._settings.steps}  {figures}")


def ends(losses: list[float]) -> tuple[float, float]:
    """Means of the first and of the last ten steps (of a quarter, in a short run)."""
    width = max(1, min(10, len(losses) // 4))
    return statistics.mean(losses[:width]), statistics.mean(losses[-width:])


def fall(losses: list[float]) -> float:
    """How far the loss fell, in nats."""
    first, last = ends(losses)
    return first - last


def differences(plain: list[float], castor: list[float]) -> list[float]:
    """Relative, of each step."""
    return [abs(c - p) / abs(p) for p, c in zip(plain, castor, strict=True)]


def failures(plain: Run, castor: Run) -> list[str]:
    """What the demo promised and did not keep."""
    found = []
    if castor.peak_device_bytes > castor.budget_bytes:
        found.append(
            f"the peak of {castor.peak_device_bytes:,} bytes passed the budget of "
            f"{castor.budget_bytes:,} bytes"
        )
    relative = differences(plain.losses, castor.losses)
    # Written so that NaN fails.
    if not relative[0] <= FIRST_LOSS_TOLERANCE:
        found.append(f"the first losses differ by {relative[0]:.1e} > {FIRST_LOSS_TOLERANCE:.0e}")
    last = differences([ends(plain.losses)[1]], [ends(castor.losses)[1]])[0]
    if not last <= LAST_LOSSES_TOLERANCE:
        found.append(f"the last losses differ by {last:.1e} > {LAST_LOSSES_TOLERANCE:.0e}")
    if not fall(castor.losses) >= NEEDED_FALL:
        found.append(
            f"the loss fell by {fall(castor.losses):.2f} nats; {NEEDED_FALL:.1f} were expected"
        )
    return found


def comparison(plain: Run, castor: Run, settings: Settings, plain_need: int) -> Table:
    """The table at the end of the demo."""
    table = Table(title=f"{settings.steps} steps, seed {settings.seed}")
    table.add_column("")
    for heading in ("plain PyTorch", "castor", "difference"):
        table.add_column(heading, justify="right")
    relative = differences(plain.losses, castor.losses)
    shown = sorted({0, *range(24, settings.steps, 25), settings.steps - 1})
    for step in shown:
        table.add_row(
            f"loss at step {step + 1}",
            f"{plain.losses[step]:.6f}",
            f"{castor.losses[step]:.6f}",
            f"{relative[step]:.1e}",
        )
    table.add_row("largest of all steps", "", "", f"{max(relative):.1e}")
    last = [ends(run.losses)[1] for run in (plain, castor)]
    difference = differences([last[0]], [last[1]])[0]
    table.add_row("mean of the last", f"{last[0]:.6f}", f"{last[1]:.6f}", f"{difference:.1e}")
    table.add_section()
    saved = castor.budget_bytes / plain_need
    table.add_row("device memory needed", mib(plain_need), mib(castor.budget_bytes), f"{saved:.1%}")
    of_budget = castor.peak_device_bytes / castor.budget_bytes
    peak = mib(castor.peak_device_bytes)
    table.add_row("peak of device memory", "", peak, f"{of_budget:.1%} of budget")
    table.add_row("host memory", "", mib(castor.host_bytes), "")
    speeds = [run.tokens_per_second(settings) for run in (plain, castor)]
    ratio = f"{speeds[1] / speeds[0]:.2f}x"
    table.add_row("tokens per second", f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", ratio)
    return table


def load(settings: Settings, console: Console) -> Batches:
    start = time.perf_counter()
    text = read_text(settings.text_bytes)
    tokens = tokenise(text, settings.vocab)
    console.print(
        f"text: {len(text):,} characters of the standard library = {len(tokens):,} tokens of a "
        f"{settings.vocab}-word byte-level BPE ({time.perf_counter() - start:.1f} s)"
    )
    return Batches(tokens, settings)


def write_report(run: Run, folder: Path, console: Console) -> None:
    """Writes report.html and trace.json, says where, and prints the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    page = report.write_html(folder / "report.html", run.boosted)
    trace = report.write_trace(folder / "trace.json", run.boosted)
    console.print(report.summary(run.boosted, width=console.width), markup=False, highlight=False)
    console.print(f"a page to look into the last step: {page}", soft_wrap=True)
    console.print(f"the same for https://ui.perfetto.dev: {trace}", soft_wrap=True)


def demo(settings: Settings, console: Console, folder: Path) -> int:
    """Trains with and without castor; returns the exit status."""
    start = time.perf_counter()
    batches = load(settings, console)
    model = build_model(settings)
    console.print(
        f"model: GPT-2, {settings.layers} layers, {settings.width} wide: "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {mib(param_bytes(model))}; "
        f"batch {settings.batch} x {settings.sequence} tokens, {settings.precision}"
    )
    probe = Settings(**{**vars(settings), "steps": PROBE_STEPS})
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    nonmodel = train(probe, batches, device_memory=machine // 2).peak_nonmodel_bytes
    budget, need = tight_budget(model, nonmodel, SHARE), plain_bytes(model, nonmodel)
    del model
    console.print(f"activations and temporaries: {mib(nonmodel)} at their peak (measured)")
    console.print(
        f"plain training needs {mib(need)}: parameters, gradients, two moments, activations\n"
        f"castor's device gets [bold]{mib(budget)}[/]: activations and {SHARE:.0%} of the "
        f"parameters, [bold]{budget / need:.0%}[/] of that"
    )
    if not budget < need / 2:
        console.print("[red]that is not less than half; make the batch smaller")
        return 1
    with ProgressLine(console, "castor", settings) as show:
        castor = train(settings, batches, device_memory=budget, show=show)
    with ProgressLine(console, "plain", settings) as show:
        plain = train(settings, batches, device_memory=None, show=show)
    console.print(comparison(plain, castor, settings, need))
    write_report(castor, folder, console)
    broken = failures(plain, castor)
    for line in broken:
        console.print(f"[red]FAILED: {line}")
    if not broken:
        console.print(
            f"[green]The loss fell by {fall(castor.losses):.2f} nats; the peak stayed within the "
            f"budget; the losses agree (first {FIRST_LOSS_TOLERANCE:.0e}, mean of the last "
            f"{LAST_LOSSES_TOLERANCE:.0e} relative). {time.perf_counter() - start:.0f} s in all."
        )
    return 1 if broken else 0


def main(arguments: list[str] | None = None) -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--demo", action="store_true", help="train with and without castor, compare")
    mode.add_argument("--plain", action="store_true", help="train without castor")
    mode.add_argument("--device-memory", default="320MiB", help="castor's budget (default 320MiB)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    for name in ("steps", "batch", "sequence", "layers", "width", "heads", "seed"):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--lr", type=float, default=default.lr, help=f"default {default.lr}")
    parser.add_argument(
        "--report",
        type=Path,
        help="folder for report.html and trace.json (default in the demo: build/demo)",
    )
    given = vars(parser.parse_args(arguments))
    folder = given.pop("report")
    run_demo, plain, memory = given.pop("demo"), given.pop("plain"), given.pop("device_memory")
    if (run_demo or plain) and given["precision"] != "fp32":
        parser.error("plain training is fp32: leave --precision out")
    if plain and folder is not None:
        parser.error("--report is of a run with castor: leave --plain out")
    if not plain and not run_demo:
        try:
            parse_bytes(memory, "--device-memory")
        except ValueError as error:
            parser.error(str(error))
    settings = Settings(**given)
    console = Console()
    if run_demo:
        return demo(settings, console, folder or Path("build/demo"))
    batches = load(settings, console)
    title = "plain" if plain else "castor"
    with ProgressLine(console, title, settings) as show:
        run = train(settings, batches, device_memory=None if plain else memory, show=show)
    console.print(
        f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, "
        f"{run.tokens_per_second(settings):,.0f} tokens/s, peak {mib(run.peak_device_bytes)} of "
        f"{mib(run.budget_bytes)}"
    )
    if folder is not None:
        write_report(run, folder, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
