"""The report of a boosted model's memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes held now."""

    device_bytes: int
    """Chunks of the model and its non-model data on the device; on a GPU that of all models."""
    nonmodel_bytes: int
    """Share of these for activations, temporaries and gradients on their way."""
    host_bytes: int
    """Chunk payloads on the host, and room there for those of resident chunks."""


@dataclass(kw_only=True)
class LogitFigures:
    """Figures of losses over deferred logits; see MemoryReport."""

    logit_rows_per_tile: int = 0
    logit_tiles: int = 0
    logit_unheld_bytes: int = 0

    def note(self, *, rows: int, rows_per_tile: int, row_bytes: int) -> None:
        """A loss was computed.

        Args:
            rows: Rows of its logits.
            rows_per_tile: At most this many at once.
            row_bytes: Of one row, in the type that the loss takes.
        """
        self.logit_rows_per_tile = min(rows, rows_per_tile)
        self.logit_tiles = -(-rows // rows_per_tile)
        unheld = (rows - self.logit_rows_per_tile) * row_bytes
        self.logit_unheld_bytes = max(self.logit_unheld_bytes, unheld)


@dataclass(frozen=True, kw_only=True)
class BlockFigures:
    """Figures of the blocks' activations; see MemoryReport."""

    activation_blocks: int = 0
    recomputed_blocks: int = 0
    kept_activation_bytes: int = 0
    recompute_seconds: float = 0.0
    offloaded_blocks: int = 0
    offloaded_activation_bytes: int = 0
    tiled_blocks: int = 0
    mlp_tiles: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Figures since boost. Sizes are bytes."""

    peak_device_bytes: int
    """Highest total of chunks and non-model data on the device, of all models of the plugin."""
    device_budget_bytes: int
    """Device budget of all models of the plugin; never passed."""
    peak_nonmodel_bytes: int
    """Highest total of activations, temporaries and gradients on their way."""
    resident_bytes: int
    """Device bytes that chunks take which placement_policy="auto" keeps there for good, now."""
    resident_chunks: int
    """Number of these chunks; their place on the host stays reserved."""
    host_bytes: int
    """Chunk payloads on the host now, and room there for those of resident chunks."""
    host_budget_bytes: int
    """Host budget of all models of the plugin."""
    nvme_bytes: int
    """Chunk payloads on NVMe."""
    nvme_weight_bytes: int
    """Share of these for parameters and gradients, which go there when the host has no room for
    them."""
    nvme_read_bytes: int
    """Bytes read from there."""
    nvme_written_bytes: int
    """Bytes written there."""
    h2d_bytes: int
    """Bytes copied from host to device."""
    d2h_bytes: int
    """Bytes copied from device to host: gradients, and parameters that user code wrote."""
    demand_fetches: int
    """Chunks that a module had to wait for."""
    prefetch_hits: int
    """Chunks that were there ahead of their use because the plan fetched them."""
    evictions: int
    """Chunks that left the device during a step to make room."""
    divergent_steps: int
    """Steps whose modules ran in another order than planned."""
    skipped_steps: int
    """Steps whose update was skipped because a gradient was not finite."""
    step_skipped: bool
    """Whether the last one was."""
    gradient_norm: float | None
    """L2 norm of the last step's gradients, of all ranks and before clipping; None before the
    first, and where nothing asks for it (max_norm=0 and nonfinite="ignore")."""
    steps: int
    """Optimizer steps."""
    plans: int
    """Times the planner ran."""
    logit_rows_per_tile: int
    """Rows in which the last loss over deferred logits was computed; 0: there was none."""
    logit_tiles: int
    """Tiles of that loss."""
    logit_unheld_bytes: int
    """Logits, of the largest such loss, that never stood in memory: all but a tile."""
    activation_blocks: int
    """Repeated parts of the model, whose activations are kept, recomputed or offloaded."""
    recomputed_blocks: int
    """Number of these that backward computes again, in whole or in part."""
    kept_activation_bytes: int
    """activations="auto": what the other blocks keep from forward to backward, as profiled."""
    recompute_seconds: float
    """activations="auto": what computing blocks again takes of a step, as profiled."""
    offloaded_blocks: int
    """Blocks, or parts of them, whose activations wait for backward in host memory."""
    offloaded_activation_bytes: int
    """Bytes that the last step copied there."""
    tiled_blocks: int
    """Blocks with a part that runs on a piece of the rows at a time."""
    mlp_tiles: int
    """activations="auto": pieces of these blocks' MLPs, as nothing less fits; 0: not by "auto"."""
    num_chunks: int
    """Chunks of the model."""
    chunk_bytes: int
    """Bytes of a regular chunk."""
    waste: float
    """Share of chunk slots that holds no parameter."""
    device_arena: str
    """Source of the device tier's memory, and what is free in it."""
    host_arena: str
    """Source of the host tier's memory."""
    rank: int
    """Rank of this process, from 0."""
    ranks: int
    """Processes that train the model together; 1: this one is alone."""
    zero_stage: int
    """ZeRO stage: ranks shard 1: masters and optimizer states; 2: gradients too; 3: weights too.
    Ranks that share memory have one copy of the latter two, where all are on one machine. 0: this
    process is alone."""
    rank_link: str
    """Link between ranks: shared memory, gloo between machines and memory within each, or gloo and
    why; empty for one that is alone."""
    rank_shared_bytes: int
    """Weights and gradients that ranks of this machine keep once for all of them; 0: each has its
    own."""
    rank_shard_bytes: int
    """Host bytes of this rank's shards of weights: one shard of each chunk, or as many as there are
    copies (extra_dp_size); 0: there are none."""
    rank_window_bytes: int
    """Host bytes of the window in which full chunks are gathered, one by one."""
    rank_gradient_shard_bytes: int
    """Host bytes of this rank's shard of the ranks' mean gradients; 0: they are full on every rank,
    or shared."""
    rank_gradient_copy_bytes: int
    """Whole chunks of those that this rank has at the moment: of which not all ranks have all, that
    were written after backward, or the last that was read."""
    rank_gradient_copy_peak_bytes: int
    """The most it had at once."""
    rank_read_bytes: int
    """Bytes of others' shards, of weights and of gradients, that came here to be read, and of
    weights that others updated and this rank keeps (extra_dp_size)."""
    rank_sent_bytes: int
    """Gradients and weights that this rank sent to others."""
    rank_crossed_bytes: int
    """Bytes of these to ranks of other machines, where those of each machine share memory; where
    ranks do not, all go over the group."""
    rank_seconds: float
    """Spent on bringing the ranks' gradients and weights together, waiting for others included."""
    nvme_engine: str
    """I/O engine of the NVMe tier; empty without one."""

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures by name; values are those of JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Returns the summary: what says how the run goes, in the units that people read."""
        return _table(_summary(self))


@dataclass(frozen=True, kw_only=True)
class TorchReport:
    """Figures since boost of a model that torch's own classes train: they keep no budget."""

    trained_by: str
    """The class or function of torch, and how many processes share the model."""
    parameter_bytes: int
    """Parameters that this rank keeps between steps."""
    gradient_bytes: int
    """Gradients that it holds now."""
    optimizer_bytes: int
    """Tensors of the optimizers' states that it holds."""
    steps: int
    """Optimizer steps."""
    skipped_steps: int
    """Steps left out, as in MemoryReport; so are the following."""
    step_skipped: bool
    gradient_norm: float | None
    rank: int
    ranks: int

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CHUNKS:
            raise AttributeError(
                f"{name} is a figure of castor's chunks, and this model is trained by "
                f"{self.trained_by}: boost it with GeminiPlugin or LowLevelZeroPlugin"
            )
        raise AttributeError(f"TorchReport has no figure {name!r}")

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures by name; values are those of JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Returns the summary."""
        return _table(
            [
                ("trained by", self.trained_by),
                ("steps", _steps(self)),
                ("parameters", size(self.parameter_bytes)),
                ("gradients", size(self.gradient_bytes)),
                ("optimizer", size(self.optimizer_bytes)),
                *_norm(self),
                *([("rank", f"{self.rank} of {self.ranks}")] if self.ranks > 1 else []),
            ]
        )


_OF_CHUNKS = {f.name for f in fields(MemoryReport)} - {f.name for f in fields(TorchReport)}


def size(count: int) -> str:
    """Returns bytes in the largest binary unit that gives at least 1."""
    for name, unit, digits in (
        ("TiB", 2**40, 2),
        ("GiB", 2**30, 2),
        ("MiB", 2**20, 1),
        ("KiB", 2**10, 1),
    ):
        if count >= unit:
            return f"{count / unit:,.{digits}f} {name}"
    return f"{count} B"


def _summary(report: MemoryReport) -> list[tuple[str, str]]:
    """Returns what stands in the summary, with its values; what did not happen is left out."""
    share = report.peak_device_bytes / max(1, report.device_budget_bytes)
    found = [
        ("steps", _steps(report)),
        (
            "device peak",
            f"{size(report.peak_device_bytes)} of a budget of {size(report.device_budget_bytes)} "
            f"({share:.1%}), of it beside chunks at most {size(report.peak_nonmodel_bytes)}",
        ),
        (
            "host",
            f"{size(report.host_bytes)} of {size(report.host_budget_bytes)}, in "
            f"{report.num_chunks:,} chunks of {size(report.chunk_bytes)}",
        ),
    ]
    if report.nvme_bytes:
        found.append(
            (
                "NVMe",
                f"{size(report.nvme_bytes)}, {size(report.nvme_weight_bytes)} of it parameters and "
                f"gradients; {size(report.nvme_read_bytes)} read, "
                f"{size(report.nvme_written_bytes)} written ({report.nvme_engine})",
            )
        )
    if report.resident_chunks:
        found.append(
            (
                "resident",
                f"{size(report.resident_bytes)} in {report.resident_chunks:,} chunks that live on "
                "the device",
            )
        )
    blocks = [
        f"{count} {what}"
        for count, what in (
            (report.recomputed_blocks, "recomputed"),
            (report.offloaded_blocks, "offloaded"),
            (report.tiled_blocks, "in tiles"),
        )
        if count
    ]
    if blocks:
        found.append(("activations", f"{', '.join(blocks)} of {report.activation_blocks} blocks"))
    if report.logit_tiles > 1:
        rows = f"{report.logit_tiles:,} tiles of {report.logit_rows_per_tile:,} rows"
        found.append(("logits", rows))
    found.append(
        (
            "copied",
            f"{size(report.h2d_bytes)} to the device, {size(report.d2h_bytes)} from it; a module "
            f"waited for {report.demand_fetches:,} chunks, {report.prefetch_hits:,} came before "
            "their use",
        )
    )
    if report.divergent_steps:
        found.append(("off the plan", f"{report.divergent_steps:,} steps"))
    found += _norm(report)
    if report.ranks > 1:
        found.append(
            (
                "rank",
                f"{report.rank} of {report.ranks}, ZeRO stage {report.zero_stage}, over "
                f"{report.rank_link}; {report.rank_seconds:,.2f} s for what ranks exchange",
            )
        )
    return found


def _steps(report: MemoryReport | TorchReport) -> str:
    skipped = f", {report.skipped_steps:,} of them skipped" if report.skipped_steps else ""
    return f"{report.steps:,}{skipped}"


def _norm(report: MemoryReport | TorchReport) -> list[tuple[str, str]]:
    norm = report.gradient_norm
    return [] if norm is None else [("gradient norm", f"{norm:.6g}")]


def _table(rows: list[tuple[str, str]]) -> str:
    """Returns names and values, a line each."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
