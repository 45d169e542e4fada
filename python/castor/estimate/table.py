"""Predicts what fits where: models, ways to train them, devices and hosts in one table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from castor.config.memory import usable_bytes
from castor.errors import UsageError
from castor.estimate.estimator import Estimator
from castor.estimate.machine import Machine, machine
from castor.estimate.workload import Workload

DEVICES = ("rtx4090", "rtx5090", "rtx6000ada", "h100")
"""Presets of the devices, by rising memory: 24, 32, 48 and 80 GB."""
HOSTS = (64, 128, 256)
"""GiB of host memory, of which training may take what GeminiPlugin does by default."""
METHODS = ("full", "LoRA", "QLoRA")
"""Ways to train: all parameters, adapters, adapters on weights of 4 bits."""
_BOUNDS = {
    "compute": "computing",
    "h2d": "link",
    "d2h": "link",
    "dram": "host memory",
    "nvme": "NVMe",
}
_MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Prediction for one model, method, device and host."""

    model: str
    """Name of the model."""
    parameters: int
    """Number of the model's parameters, without adapters."""
    method: str
    """One of METHODS."""
    device: str
    """Name of the device's preset."""
    host_gib: int
    """GiB of the host's memory."""
    longest_sequence: int
    """Tokens of the longest samples of which the batch fits; 0 if none does."""
    lacks: str | None
    """Memory that lacks room, "host" or "device"; None if a sequence fits, or nothing is known."""
    refused: str | None
    """Error with which the model's step cannot be predicted; None if it can."""
    sequence: int
    """Tokens of the samples that `tokens_per_s` is predicted for; 0 if none fits."""
    tokens_per_s: float | None
    """Tokens per second of steps with such samples; None if none fits."""
    bound: str | None
    """Resource that is busy longest in such a step, as in Estimate; None if none fits."""


def known_models() -> list[Path]:
    """Returns the configs that castor brings for this table, smallest model first."""
    found = {path: json.loads(path.read_text(encoding="utf-8")) for path in _MODELS.glob("*.json")}
    return sorted(found, key=lambda path: (found[path]["hidden_size"], path.name))


def name_of(config: Path) -> str:
    """Returns the name that a config gives its model, else that of its file or folder."""
    document = json.loads(config.read_text(encoding="utf-8"))
    file = config.parent.name if config.stem == "config" else config.stem
    return str(document.get("_name_or_path") or file)


def cells(
    config: Path,
    workload: Workload,
    *,
    adapter_rank: int,
    nvme: str | None = None,
    nvme_memory: str | None = None,
    methods: Sequence[str] = METHODS,
    devices: Sequence[str] = DEVICES,
    hosts: Sequence[int] = HOSTS,
) -> Iterator[Cell]:
    """Yields the predictions for a model.

    Args:
        config: Path of the model's config.json.
        workload: Batch, tokens and options of a step; its adapters are not read. The speed is that
            of samples of its tokens, or of the longest that fit if those are shorter.
        adapter_rank: Rank of the adapters.
        nvme: Bandwidth of NVMe for what the host has no room for; None: there is none.
        nvme_memory: Size of NVMe; None: as much as is needed.
        methods: Ways to train.
        devices: Names of presets.
        hosts: GiB of host memory.

    Raises:
        OSError, ValueError, ModuleNotFoundError: See Estimator.
    """
    name = name_of(config)
    parameters = 0
    for method in methods:
        estimator = Estimator(config, _with(workload, method, adapter_rank))
        parameters = parameters or _without_adapters(estimator, method)
        for device in devices:
            on_hosts = [
                machine(
                    device,
                    precision=workload.precision,
                    host_memory=usable_bytes(host * 2**30),
                    nvme=nvme,
                    nvme_memory=nvme_memory,
                )
                for host in hosts
            ]
            predicted = _predicted(estimator, on_hosts)
            for host, of_machine in zip(hosts, predicted, strict=True):
                yield Cell(
                    model=name,
                    parameters=parameters,
                    method=method,
                    device=device,
                    host_gib=host,
                    **of_machine,
                )


def _with(workload: Workload, method: str, rank: int) -> Workload:
    adapted = None if method == "full" else rank
    return replace(workload, lora_rank=adapted, four_bit_base=method == "QLoRA")


def _without_adapters(estimator: Estimator, method: str) -> int:
    return estimator.num_parameters - (0 if method == "full" else estimator.num_trained)


def _predicted(estimator: Estimator, on_hosts: Sequence[Machine]) -> list[dict[str, Any]]:
    """Returns the figures of one device on several hosts."""
    workload = estimator.workload
    found: dict[int, dict[str, Any]] = {}
    longest: int | None = None
    best: dict[str, Any] | None = None
    # The largest host first: what is fastest there and takes no more than a smaller one has is
    # fastest there too.
    for number, on in sorted(enumerate(on_hosts), key=lambda of: -of[1].host_bytes):
        if not estimator.has_host_storage(on):
            found[number] = _none("host")
            continue
        if longest is None:  # of activations, the host has none of the least that a step takes
            try:
                longest = estimator.max_sequence(on)
            except (UsageError, ValueError) as error:
                return [_none(refused=str(error)) for _ in on_hosts]
            if longest is None:
                raise ValueError("a table has the longest sequences of models that take tokens")
        if not longest:
            found[number] = _none("device")
            continue
        sequence = min(workload.sequence, longest)
        if best is None or on.nvme is not None or best["host_bytes"] > on.host_bytes:
            best = estimator.simulate(estimator.step(workload.batch, sequence), on)
        found[number] = {
            "longest_sequence": longest,
            "lacks": None,
            "refused": None,
            "sequence": sequence,
            "tokens_per_s": workload.batch * sequence / best["step_seconds"],
            "bound": best["bound"],
        }
    return [found[number] for number in range(len(on_hosts))]


def _none(lacks: str | None = None, refused: str | None = None) -> dict[str, Any]:
    return {
        "longest_sequence": 0, "lacks": lacks, "refused": refused, "sequence": 0,
        "tokens_per_s": None, "bound": None,
    }  # fmt: skip


def as_json(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Returns the cells as `castor estimate --table --json` prints them."""
    return [asdict(cell) for cell in found]


def shown(cell: Cell) -> str:
    """Returns a cell's text: longest sequence, speed and its bound, or what lacks room."""
    if cell.tokens_per_s is None or cell.bound is None:
        return "not predicted" if cell.refused else f"no: {cell.lacks}"
    return f"{cell.longest_sequence:,}; {cell.tokens_per_s:,.0f}/s, {_BOUNDS[cell.bound]}"


@dataclass(frozen=True)
class _Row:
    method: str
    host: str
    texts: tuple[str, ...]


def _rows(of_model: Sequence[Cell]) -> Iterator[_Row]:
    """Yields the rows of a model's table: one for each method and host."""
    for method, host in dict.fromkeys((cell.method, cell.host_gib) for cell in of_model):
        alike = [cell for cell in of_model if (cell.method, cell.host_gib) == (method, host)]
        yield _Row(method, f"{host} GiB", tuple(map(shown, alike)))


def _by_model(found: Sequence[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    for name in dict.fromkeys(cell.model for cell in found):
        yield name, [cell for cell in found if cell.model == name]


def _refusals(of_model: Sequence[Cell]) -> list[str]:
    """Returns why steps of a model cannot be predicted, once for each method."""
    found = {cell.method: cell.refused for cell in of_model if cell.refused}
    return [f"{method} is not predicted: {refused}." for method, refused in found.items()]


def _devices(of_model: Sequence[Cell]) -> list[str]:
    memory = {name: round(machine(name).device_bytes / 2**30) for name in DEVICES}
    return [
        f"{name} ({memory[name]} GiB)" for name in dict.fromkeys(cell.device for cell in of_model)
    ]


def _legend(workload: Workload, adapter_rank: int, nvme: str | None) -> str:
    disk = f"NVMe of {nvme}" if nvme else "no NVMe"
    return (
        f"Predictions, not measurements: {workload.precision}, {workload.optimizer}, state format "
        f"{workload.state_format}, activations auto, adapters of rank {adapter_rank}, {disk}. A "
        f"cell has the longest sequence that fits at batch {workload.batch}; tokens per second at "
        f"{workload.sequence:,} tokens, or at the longest if that is shorter; and what bounds them."
        ' "no" names the memory that has no room.'
    )


def render(
    found: Sequence[Cell], workload: Workload, adapter_rank: int, nvme: str | None, console: Console
) -> None:
    """Prints the tables of all models."""
    console.print(_legend(workload, adapter_rank, nvme))
    for name, of_model in _by_model(found):
        table = Table(title=f"{name}, {of_model[0].parameters / 1e9:.1f}B", title_justify="left")
        for column in ("train", "host", *_devices(of_model)):
            table.add_column(column)
        for row in _rows(of_model):
            table.add_row(row.method, row.host, *row.texts)
        console.print(table)
        for refusal in _refusals(of_model):
            console.print(refusal, markup=False)


def page(
    found: Sequence[Cell], workload: Workload, adapter_rank: int, nvme: str | None, command: str
) -> str:
    """Returns the tables as a page in Markdown.

    Args:
        found: The cells.
        workload: Their workload.
        adapter_rank: Rank of the adapters.
        nvme: Bandwidth of NVMe, if there is one.
        command: The command that makes the page.
    """
    lines = [
        "# What fits where",
        "",
        _legend(workload, adapter_rank, nvme),
        "",
        "```sh",
        command,
        "```",
        "",
        "makes this page. [Estimate a machine](guides/estimate.md) says how far to trust such "
        "predictions, and answers for your own model and machine.",
        "",
        "- Devices and hosts are presets of `castor estimate` with another host memory, of which "
        "training takes [what budgets come to](guides/policies-and-budgets.md#default-budgets).",
        "- LoRA and QLoRA have adapters on all linear layers. Experts are no linear layers in "
        "transformers: those of gpt-oss have no adapters, and experts' weights stay in 16 bits.",
        "- A sequence is never longer than the config's `max_position_embeddings`.",
    ]
    for name, of_model in _by_model(found):
        columns = ["train", "host", *_devices(of_model)]
        lines += ["", f"## {name}", "", f"{of_model[0].parameters / 1e9:.1f}B parameters.", ""]
        lines += [_line(columns), _line(["---"] * len(columns))]
        lines += [_line([row.method, row.host, *row.texts]) for row in _rows(of_model)]
        for refusal in _refusals(of_model):
            lines += ["", refusal]
    return "\n".join(lines) + "\n"


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"
