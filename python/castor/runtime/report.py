"""The report of a boosted model's memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes in use now."""

    device_bytes: int
    """Chunks and non-model data of the model on the device; on a GPU the non-model data of all
    models."""
    nonmodel_bytes: int
    """Share of these for activations, temporaries and gradients on their way."""
    host_bytes: int
    """Chunk payloads on the host, and room there for those of resident chunks."""


@dataclass(kw_only=True)
class LogitFigures:
    """Figures of losses over deferred logits; see MemoryReport."""

    logit_rows_per_tile: int = 0
    logit_tiles: int = 0
    logit_avoided_bytes: int = 0

    def note(self, *, rows: int, rows_per_tile: int, row_bytes: int) -> None:
        """Records that a loss was computed.

        Args:
            rows: Number of rows of its logits.
            rows_per_tile: Most rows of a tile.
            row_bytes: Bytes of one row, in the type that the loss takes.
        """
        self.logit_rows_per_tile = min(rows, rows_per_tile)
        self.logit_tiles = -(-rows // rows_per_tile)
        avoided = (rows - self.logit_rows_per_tile) * row_bytes
        self.logit_avoided_bytes = max(self.logit_avoided_bytes, avoided)


@dataclass(frozen=True, kw_only=True)
class BlockFigures:
    """Figures of the blocks' activations; see MemoryReport."""

    activation_blocks: int = 0
    recomputed_blocks: int = 0
    saved_activation_bytes: int = 0
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
    """Device bytes of chunks that placement_policy="auto" keeps resident on the device now."""
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
    """Bytes read from NVMe."""
    nvme_written_bytes: int
    """Bytes written to NVMe."""
    h2d_bytes: int
    """Bytes copied from host to device."""
    d2h_bytes: int
    """Bytes copied from device to host: gradients, and parameters that user code wrote."""
    demand_fetches: int
    """Chunks that a module had to wait for."""
    prefetch_hits: int
    """Chunks that the plan fetched before their use."""
    evictions: int
    """Chunks that left the device during a step to make room."""
    divergent_steps: int
    """Steps whose modules ran in another order than planned."""
    skipped_steps: int
    """Steps whose update was skipped because a gradient was not finite."""
    step_skipped: bool
    """Whether the last step's update was skipped."""
    gradient_norm: float | None
    """L2 norm of the last step's gradients, over all ranks and before clipping. None before the
    first step, and where nothing needs it (max_norm=0 and nonfinite="ignore")."""
    steps: int
    """Optimizer steps."""
    plans: int
    """Times the planner ran."""
    logit_rows_per_tile: int
    """Rows in which the last loss over deferred logits was computed; 0: there was none."""
    logit_tiles: int
    """Number of tiles of that loss."""
    logit_avoided_bytes: int
    """Bytes of logits that were never in memory, for the largest such loss: all but one tile."""
    activation_blocks: int
    """Number of blocks: repeated parts of the model, whose activations are kept, recomputed or
    offloaded."""
    recomputed_blocks: int
    """Number of these that backward computes again, in whole or in part."""
    saved_activation_bytes: int
    """activations="auto": bytes that the other blocks save for backward, as profiled."""
    recompute_seconds: float
    """activations="auto": seconds of a step that recomputing blocks takes, as profiled."""
    offloaded_blocks: int
    """Blocks, or parts of them, whose activations wait for backward in host memory."""
    offloaded_activation_bytes: int
    """Activation bytes that the last step copied to host memory."""
    tiled_blocks: int
    """Number of blocks with a part that runs in tiles of rows."""
    mlp_tiles: int
    """activations="auto": number of tiles of these blocks' MLPs, where nothing less fits; 0: "auto"
    has chosen none."""
    expert_hits: int
    """gather_experts: number of experts that passes needed and the device had."""
    expert_misses: int
    """Number of experts that were fetched by themselves."""
    expert_fetched_bytes: int
    """Bytes of these, which are a share of h2d_bytes."""
    expert_cache_bytes: int
    """Device bytes that the cache of experts takes now; a share of the non-model data."""
    expert_guessed_bytes: int
    """Bytes of experts that were fetched before the router chose, by a guess; a share of h2d_bytes,
    apart from expert_fetched_bytes."""
    expert_right_guesses: int
    """Number of these experts that the router chose; a share of expert_hits."""
    num_chunks: int
    """Number of chunks of the model."""
    chunk_bytes: int
    """Bytes of a regular chunk."""
    waste: float
    """Share of chunk slots that holds no parameter."""
    device_arena: str
    """Source of the device tier's memory, and the free memory in it."""
    host_arena: str
    """Source of the host tier's memory."""
    rank: int
    """Rank of this process, from 0."""
    ranks: int
    """Number of processes that train the model together; 1: this one is alone."""
    zero_stage: int
    """ZeRO stage that runs. Ranks shard with 1: masters and optimizer states; 2: gradients too; 3:
    weights too. Ranks of one machine that share memory have one copy of gradients and weights
    instead. 0: this process is alone."""
    rank_link: str
    """Link between ranks: shared memory, gloo between machines and memory within each, or gloo and
    why. Empty if this process is alone."""
    reduction: str
    """Addition of what ranks give: "ordered", by castor in rank order, or "backend", by that of the
    process group. Empty: this process is alone."""
    device_link: str
    """Backend through which tensor-, context-, expert- and pipeline-parallel ranks send tensors
    from device to device, and data-parallel ranks gradients that they reduce there: "nccl". Empty:
    through host memory, or there are no such ranks."""
    reduced_on: str
    """Place where data-parallel ranks reduce gradients: "device", or "host" and why ("host: as
    asked for"). Empty: this process is alone."""
    communicator_bytes: int
    """Device bytes that the communicators of device_link take of the budget."""
    rank_shared_bytes: int
    """Bytes of weights and gradients of which the ranks of this machine share one copy; 0: each
    rank has its own."""
    rank_shard_bytes: int
    """Host bytes of this rank's shards of weights: extra_dp_size shards of each chunk. 0: weights
    are not sharded."""
    rank_window_bytes: int
    """Host bytes of the window in which full chunks are gathered."""
    rank_gradient_shard_bytes: int
    """Host bytes of this rank's shard of the ranks' mean gradients; 0: they are full on every rank,
    or shared."""
    rank_gradient_copy_bytes: int
    """Host bytes of full chunks of gradients that this rank has now: chunks that not all ranks have
    completed, chunks written after backward, and the chunk that was read last."""
    rank_gradient_copy_peak_bytes: int
    """Highest value of rank_gradient_copy_bytes."""
    rank_read_bytes: int
    """Bytes that this rank received: other ranks' shards of weights and gradients to read, and
    weights that others updated and this rank keeps too (extra_dp_size)."""
    rank_sent_bytes: int
    """Bytes of gradients and weights that this rank sent to others."""
    rank_crossed_bytes: int
    """Share of rank_sent_bytes that went to other machines, where the ranks of each machine share
    memory. Where they do not, all bytes go over the process group."""
    rank_seconds: float
    """Seconds spent on exchanging gradients and weights, waiting for other ranks included."""
    rank_exposed_seconds: float
    """Share of rank_seconds in which the thread that computes waited: at the end of backward
    passes, and before steps, for gradients that were not reduced beside them, and slower ranks."""
    rank_exposed_share: float
    """Share of the steps' time that these seconds took; 0 before the first step. Steps are timed
    from the forward of the boosted model on."""
    device_update_fraction: float
    """Share of the updates of chunks on the host that the GPU runs (device_update_fraction);
    "auto": the share of the next update."""
    device_updated_elements: int
    """Elements of chunks on the host that the GPU has updated."""
    device_update_bytes: int
    """Device bytes that these updates take of the budget."""
    nvme_engine: str
    """I/O engine of the NVMe tier; empty without one."""
    locked_limit_bytes: int
    """Host bytes that the system page-locks for a GPU, where that is less than host_memory: the
    nvme figures then count payloads in memory that is not page-locked, unless nvme_path was given.
    0: no limit was met."""

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures by name; values are those of JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Returns the summary: the main figures in readable units, a line each."""
        return _table(_summary(self))


@dataclass(frozen=True, kw_only=True)
class TorchReport:
    """Figures since boost of a model that torch's own classes train, which have no budget."""

    trained_by: str
    """The class or function of torch, and how many processes share the model."""
    parameter_bytes: int
    """Bytes of parameters that this rank keeps between steps."""
    gradient_bytes: int
    """Bytes of gradients that this rank has now."""
    optimizer_bytes: int
    """Bytes of the optimizers' state tensors that this rank has."""
    steps: int
    """Optimizer steps."""
    skipped_steps: int
    """Steps whose update was skipped. This and the following fields: see MemoryReport."""
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
    """Returns the lines of the summary, (name, value), without figures of unused features."""
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
    if report.locked_limit_bytes:
        found.append(("page-locked", f"at most {size(report.locked_limit_bytes)} of host memory"))
    if report.nvme_bytes:
        found.append(
            (
                "NVMe",
                f"{size(report.nvme_bytes)}, {size(report.nvme_weight_bytes)} of it parameters and "
                f"gradients; {size(report.nvme_read_bytes)} read, "
                f"{size(report.nvme_written_bytes)} written ({report.nvme_engine})",
            )
        )
    if report.device_update_bytes:
        found.append(
            (
                "updates",
                f"the GPU ran those of {report.device_updated_elements:,} elements of chunks on "
                f"the host, its share now {report.device_update_fraction:.0%}, through "
                f"{size(report.device_update_bytes)} of device memory",
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
    if report.expert_hits or report.expert_misses:
        share = report.expert_hits / (report.expert_hits + report.expert_misses)
        found.append(
            (
                "experts",
                f"{report.expert_misses:,} fetched, {size(report.expert_fetched_bytes)}; "
                f"{share:.0%} of those needed were on the device, in a cache of "
                f"{size(report.expert_cache_bytes)}",
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
                f"{report.rank_link}; {report.rank_seconds:,.2f} s for what ranks exchange, "
                f"{1e3 * report.rank_exposed_seconds / max(1, report.steps):,.1f} ms a step "
                f"({report.rank_exposed_share:.1%}) of it waited for"
                + (f", added by {report.device_link}" if report.reduction == "backend" else "")
                + f"; gradients reduced on the {report.reduced_on}",
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
    """Formats names and values as a table, a line each."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
