"""Writes the tables of measured figures in docs/status.md from benchmarks/results/*.json.

Usage: status.py. A row of ROWS says where its figure stands in a record; command, commit and
verdict follow from that. What a record lacks is "not measured yet". Rows of one benchmark stand
together.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "status.md"
BEGIN = "<!-- Figures of benchmarks/results: python scripts/status.py writes them. -->\n"
END = "<!-- The end of these figures. -->\n"
HEADINGS = ("what", "figure", "target", "verdict")
MISSING = "not measured yet"

Record = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What every value of a figure is held against."""

    words: str
    meets: Callable[[Sequence[float]], bool]


def at_most(bound: float) -> Target:
    return Target(f"at most {bound:g}", lambda values: max(values) <= bound)


def at_least(bound: float) -> Target:
    return Target(f"at least {bound:g}", lambda values: min(values) >= bound)


def within(low: float, high: float) -> Target:
    return Target(f"{low:g} to {high:g}", lambda v: low <= min(v) and max(v) <= high)


ALL = Target("all", all)
FALLING = Target("falling", lambda v: all(b < a for a, b in pairwise(v)))  # NaN is never smaller


@dataclass(frozen=True)
class Unit:
    """How a number of a record is written, and in what its target is given."""

    of_record: float = 1.0
    """How much of what the record counts makes one."""
    name: str = ""
    digits: int = 2

    def words(self, value: float) -> str:
        """With its name."""
        return f"{value:,.{self.digits}f}{self.name}"


RATIO, SHARP, SECONDS = Unit(), Unit(digits=3), Unit(name=" s", digits=1)
MIB, GIB = Unit(2**20, " MiB", 0), Unit(2**30, " GiB")
MB, MICROSECONDS = Unit(1e6, " MB", 0), Unit(1e3, " us")  # of nanoseconds
PER_MODULE = Unit(name=" us", digits=1)


@dataclass(frozen=True)
class Row:
    """One figure of one benchmark."""

    benchmark: str
    what: str
    path: tuple[str | int, ...]
    """In the record, to a number, a truth, a spread (which has a median) or a list of numbers.
    "*" goes to every value, "NAME*" to that of the first key which begins so."""
    target: Target | None = None
    unit: Unit = RATIO


GPT = "GPT-2*"
ROWS = (
    Row("gpu", "copies to the GPU / torch's copy_ of pinned memory, their speeds",
        ("copies", "in_over_torch"), at_least(0.9)),
    Row("gpu", "copies to the host / torch's", ("copies", "out_over_torch"), at_least(0.9)),
    Row("gpu", "both ways at once / torch's on two streams", ("copies", "both_over_torch"),
        at_least(0.9)),
    Row("gpu", "bandwidth of the Adam kernel / of adding in place, fp32",
        ("kernels", "fraction_of_in_place", "adam_fp32"), at_least(0.9)),
    Row("gpu", "the same, bf16 with fp32 masters",
        ("kernels", "fraction_of_in_place", "adam_bf16"), at_least(0.9)),
    Row("gpu", "torch's fused AdamW / the Adam kernel, fp32, times",
        ("kernels", "adam_fp32_over_torch"), at_least(1)),
    Row("gpu", "1.2B GPT-2, 16,384 tokens a step: resident step / step, placed by auto",
        ("steps", "16384", "castor_auto", "fraction_of_compute"), at_least(0.9)),
    Row("gpu", "the same, all parameters streamed, every update on the host's 16 cores, fp32 state",
        ("steps", "16384", "castor_streamed", "fraction_of_compute"), at_least(0.9)),
    Row("step", "step, ample budget / plain PyTorch",
        ("ratios", "castor ample / plain"), at_most(1.05)),
    Row("step", "step, tight(0.35) / plain PyTorch",
        ("ratios", "castor tight / plain"), at_most(1.10)),
    Row("step", "DeepSpeed ZeRO-3 with CPU offload / step, tight(0.35)",
        ("ratios", "zero3 / castor tight"), at_least(1.6)),
    Row("step", "DeepSpeed ZeRO-2 with CPU offload / step, tight(0.35)",
        ("ratios", "zero2 / castor tight"), at_least(1.3)),
    Row("step", "FSDP2 with CPUOffloadPolicy / step, tight(0.35)",
        ("ratios", "fsdp2 / castor tight")),
    Row("step", "device memory at its peak, tight(0.35)",
        ("reports", "castor tight", "peak_device_bytes"), unit=MIB),
    Row("step", "the process's resident memory at its peak, libraries and both tiers, tight(0.35)",
        ("results", "castor tight", "peak_resident_bytes"), unit=MIB),
    Row("step", "that of plain PyTorch",
        ("results", "plain", "peak_resident_bytes"), unit=MIB),
    Row("step", "that of DeepSpeed ZeRO-3 with CPU offload",
        ("results", "zero3", "peak_resident_bytes"), unit=MIB),
    Row("step", "of resident memory, on huge pages, tight(0.35)",
        ("results", "castor tight", "huge_page_bytes"), unit=MIB),
    Row("step", "of plain PyTorch's", ("results", "plain", "huge_page_bytes"), unit=MIB),
    Row("zero", "two ranks, a step with an ample budget / DDP",
        ("ratios", "castor ample / ddp"), at_most(1.05)),
    Row("zero", "two ranks, a step with an ample budget / FSDP2",
        ("ratios", "castor ample / fsdp2"), at_most(0.75)),
    Row("zero", "two ranks, a step with an ample budget / DeepSpeed ZeRO-3",
        ("ratios", "castor ample / zero3"), at_most(0.60)),
    Row("zero", "two ranks, tight(0.35) / DDP",
        ("ratios", "castor tight / ddp"), at_most(1.10)),
    Row("zero", "bytes of that step over the loopback device",
        ("contenders", "castor tight", "loopback_bytes"), unit=MIB),
    Row("zero", "DDP's", ("contenders", "ddp", "loopback_bytes"), unit=MIB),
    Row("hybrid_parallel", "a step with tensor parallelism (2) / transformers' `tp_plan`",
        ("ratios", "castor ample / transformers"), at_most(1.0)),
    Row("hybrid_parallel", "the same at tight(0.5) of a rank's part",
        ("ratios", "castor tight / transformers")),
    Row("hybrid_parallel", "a step with tensor parallelism (2) / torch's `parallelize_module`",
        ("ratios", "castor ample / torch")),
    Row("hybrid_parallel", "the same with sequence parallelism / without",
        ("ratios", "castor, tokens too / castor ample")),
    Row("hybrid_parallel", "a step with tensor parallelism (2) / one process, two threads",
        ("ratios", "castor ample / plain")),
    Row("sequence_parallel", "a step with context parallelism (2) / DeepSpeed's Ulysses",
        ("ratios", "castor ample / deepspeed"), at_most(1.0)),
    Row("sequence_parallel", "the same at tight(0.5)",
        ("ratios", "castor tight / deepspeed")),
    Row("sequence_parallel", "the same with keys in a ring, ample budget",
        ("ratios", "castor ring / deepspeed")),
    Row("sequence_parallel", "a step with context parallelism (2) / one process, two threads",
        ("ratios", "castor ample / plain")),
    Row("layouts", "of ten layouts, predicted within 20% of the measured step",
        ("within_target",), at_least(10)),
    Row("layouts", "of layouts on 2 and on 4 ranks, the three fastest predicted in their order",
        ("kinds_in_order",), at_least(2), Unit(digits=0)),
    Row("layouts", "the same of all ten together (1: so it is)", ("three_fastest_in_order",),
        at_least(1), Unit(digits=0)),
    Row("layouts", "1, 2 and 4 data-parallel replicas: the farthest from the measured step",
        ("copies_off_by",), at_most(0.15)),
    Row("layouts", "a search for Llama 70B on 64 ranks",
        ("search_of_70b_on_64_ranks", "seconds"), at_most(60), Unit(name=" s", digits=0)),
    Row("pipelines", "a step of a model in two stages / torch's pipelining of the same stages",
        ("ratios", "castor ample / torch"), at_most(1.05)),
    Row("pipelines", "the same at tight(0.5) of a rank's stage",
        ("ratios", "castor tight / torch")),
    Row("pipelines", "a step of a model in two stages / one process, two threads",
        ("ratios", "castor ample / plain")),
    Row("builds", "step with room for all, this build / one before core and session were split",
        ("ample", "ratio"), at_most(1.03)),
    Row("builds", "step at tight(0.35), this build / that one",
        ("tight", "ratio"), at_most(1.03)),
    Row("builds", "hooks of 10,000 modules, this build / that one",
        ("hooks", "ratio"), at_most(1.03)),
    Row("activations", 'smallest budget, `activations="auto"` and tiled logits / without; GPT-2',
        ("results", GPT, "smallest_ratio"), at_most(0.30)),
    Row("activations", "the same, a small Llama with a vocabulary of 128k at 1 x 4096 tokens",
        ("results", "Llama, 128k vocabulary", "smallest_ratio"), at_most(0.30)),
    Row("activations", "step of auto / the best by hand, at four budgets, the worst",
        ("results", GPT, "largest_step_ratio"), at_most(1.05)),
    Row("activations", "all blocks offloaded behind 2 GB/s / the longer of computing and link",
        ("results", GPT, "behind_link", "step_ratio"), at_most(1.10)),
    Row("activations", "largest batch of auto and tiled logits in 1.5 times one sample's need",
        ("results", GPT, "largest_batch", "tiles, auto"), at_least(3), Unit(digits=0)),
    Row("activation_peers", 'largest batch of `activations="auto"` where two samples can be kept',
        ("results", "largest_batch", "castor auto"), unit=Unit(digits=0)),
    Row("activation_peers", "the same, logits all at once",
        ("results", "largest_batch", "castor auto, whole logits"), unit=Unit(digits=0)),
    Row("activation_peers", "transformers' checkpointing of every block",
        ("results", "largest_batch", "checkpointing"), unit=Unit(digits=0)),
    Row("activation_peers", "... of every second block",
        ("results", "largest_batch", "checkpointing, every second"), unit=Unit(digits=0)),
    Row("activation_peers", "torch's `save_on_cpu`",
        ("results", "largest_batch", "save_on_cpu"), unit=Unit(digits=0)),
    Row("activation_peers", "step at one batch, transformers' checkpointing / `auto`, logits alike",
        ("results", "step_ratio", "checkpointing")),
    Row("activation_peers", "torch's `save_on_cpu` / `auto`, logits alike",
        ("results", "step_ratio", "save_on_cpu")),
    Row("logits", "forward and backward with tiles of 512 logits / all at once; GPT-2",
        ("results", GPT, "tiles of 512", "forward_and_backward_ratio")),
    Row("logits", "the same, the small Llama",
        ("results", "Llama, 128k vocabulary", "tiles of 512", "forward_and_backward_ratio")),
    Row("compiled", "step of compiled blocks, room for all / plain PyTorch, compiled alike",
        ("results", "ample", "step_ratio"), at_most(1.05)),
    Row("compiled", "its forward and backward",
        ("results", "ample", "forward_and_backward_ratio")),
    Row("compiled", "forward and backward, half of the parameters streamed",
        ("results", "streaming", "forward_and_backward_ratio")),
    Row("overlap", 'step of 42.5M behind 2 GB/s, 4 x 128, `overlap="forward"` / the longest of '
        "compute, link, DRAM",
        ("cases", "42.5M, 4 x 128", "results", "forward", "over_longest"), at_most(1.10)),
    Row("overlap", "the same, one after the other",
        ("cases", "42.5M, 4 x 128", "results", "serial", "over_longest")),
    Row("overlap", "42.5M, 1 x 64 tokens, where offloading is the work",
        ("cases", "42.5M, 1 x 64", "results", "forward", "over_longest"), at_most(1.10)),
    Row("overlap", "the same, one after the other",
        ("cases", "42.5M, 1 x 64", "results", "serial", "over_longest")),
    Row("overlap", "312M, 1 x 64 tokens",
        ("cases", "312M, 1 x 64", "results", "forward", "over_longest"), at_most(1.10)),
    Row("overlap", "the same, one after the other",
        ("cases", "312M, 1 x 64", "results", "serial", "over_longest")),
    Row("generation", "a token of GPT-2 42.5M, half of its parameters in the budget, behind "
        "2 GB/s / the bytes that it streams",
        ("cases", "GPT-2 42.5M", "results", "castor", "over_link"), at_most(1.10)),
    Row("generation", "the same, 312M",
        ("cases", "GPT-2 312M", "results", "castor", "over_link"), at_most(1.10)),
    Row("generation", "the same, a Llama of 134M",
        ("cases", "Llama 134M", "results", "castor", "over_link"), at_most(1.10)),
    Row("generation", "GPT-2 42.5M, fetched on demand / the bytes that it streams",
        ("cases", "GPT-2 42.5M", "results", "castor, on demand", "over_link")),
    Row("generation", "demand fetches behind the first token",
        ("cases", "*", "results", "castor", "demand_fetches"), at_most(0), Unit(digits=0)),
    Row("experts", "a token of a Qwen3-MoE of 4.9 GB, half of it in the budget, behind 2 GB/s / "
        "the experts that the cache lacks",
        ("results", "experts", "over_link"), at_most(1.15)),
    Row("experts", "tokens a second / those with full layers", ("speedup",), at_least(5)),
    Row("expert_training", "bytes that a step of 2 x 128 tokens fetches / those of the experts "
        "that it touches, 16 distinct tokens",
        ("results", "16 tokens", "fetched_over_touched"), at_most(1.10)),
    Row("expert_training", "its time with full layers / with experts by the row",
        ("results", "16 tokens", "speedup")),
    Row("hybrid", "bytes over the link with room for 0, 25, 50 and 100% of all payloads, streamed",
        ("results", "*", "link_bytes_per_step", "streamed"), unit=MB),
    Row("hybrid", "the same, whole chunks in spare memory",
        ("results", "*", "link_bytes_per_step", "hybrid"), unit=MB),
    Row("hybrid", "step with whole chunks in spare memory / streamed", ("results", "*", "ratio")),
    Row("nvme", "optimizer step with all state on NVMe / its bytes at the device's bandwidth",
        ("results", "nvme", "over_device"), at_most(1.15)),
    Row("nvme", "that step with checksums / without", ("with_checksums_over_without",)),
    Row("nvme", "DeepSpeed ZeRO-3 with NVMe optimizer offload / that step",
        ("deepspeed_over_castor",), at_least(1.5)),
    Row("checkpoints", "a save beside the training: the call and what the next step takes beyond a "
        "step / a step", ("results", "stall_of_next_step", "steps"), at_most(0.05)),
    Row("checkpoints", "the same of two ranks that write it together",
        ("two_ranks", "stall_of_next_step", "steps"), at_most(0.05)),
    Row("checkpoints", "the same of steps over eight times as many tokens (4,096)",
        ("longer_steps", "stall_of_next_step", "steps"), at_most(0.05)),
    Row("checkpoints", "a save at once / a step", ("results", "save_at_once", "steps")),
    Row("checkpoints", "the first one of a run, which also pays for its memory / a step",
        ("results", "first_save", "steps")),
    Row("checkpoints", "processor seconds of a save at once, which one beside the training spreads "
        "over the steps until it is written / a step", ("results", "processor_at_once", "steps")),
    Row("checkpoints", "what all steps until it is written take beyond others / a step",
        ("results", "stall_of_all", "steps")),
    Row("beyond", "parameters, gradients and state / device and host budgets, 304M in bf16",
        ("runs", 0, "over_budgets"), at_least(3)),
    Row("beyond", "resident memory at its peak in that run",
        ("runs", 0, "peak_resident_bytes"), unit=MIB),
    Row("beyond", "the same with parameters and gradients on NVMe too",
        ("runs", 1, "over_budgets"), at_least(3)),
    Row("beyond", "resident memory at its peak in that run",
        ("runs", 1, "peak_resident_bytes"), unit=MIB),
    Row("beyond", "the same losses in both, bit for bit", ("same_losses",), ALL),
    Row("llama8b", "Llama of 8.03B parameters, 4 GiB of device and 12 GiB of host memory, the rest "
        "on NVMe: resident memory at its peak, boost included",
        ("peak_resident_bytes",), at_most(19), GIB),
    Row("llama8b", "boost", ("boost", "seconds"), unit=SECONDS),
    Row("llama8b", "steps", ("steps", "*", "seconds"), unit=SECONDS),
    Row("llama8b", "their losses", ("steps", "*", "loss"), FALLING),
    Row("io", "io_uring / fio, read", ("ratios", "read", "io_uring"), at_least(0.90)),
    Row("io", "io_uring / fio, write", ("ratios", "write", "io_uring"), at_least(0.90)),
    Row("io", "io_uring / fio, mixed", ("ratios", "mixed", "io_uring"), at_least(0.90)),
    Row("io", "threads / fio, read", ("ratios", "read", "threads"), at_least(0.75)),
    Row("io", "threads / fio, write", ("ratios", "write", "threads"), at_least(0.75)),
    Row("io", "threads / fio, mixed", ("ratios", "mixed", "threads"), at_least(0.75)),
    Row("adam", "Adam fp32, fraction of the in-place bandwidth",
        ("ratios", "castor: fraction of in-place bandwidth"), at_least(0.90)),
    Row("adam", "Adam fp32 over DeepSpeedCPUAdam",
        ("ratios", "castor: speed-up over deepspeed"), at_least(1.0)),
    Row("adam", "Adam fp32 over torch's fused AdamW",
        ("ratios", "castor: speed-up over torch"), at_least(1.0)),
    Row("adam", "Adam bf16 over DeepSpeed's fp32 step and its copy",
        ("ratios", "castor_bf16: speed-up over deepspeed + copy"), at_least(1.15)),
    Row("adam", "Adam `split_bf16` over the faster fp32 peer",
        ("ratios", "split_bf16: speed-up over the faster fp32 peer"), at_least(1.4)),
    Row("adam", "Adam `split_bf16`, fraction of the in-place bandwidth",
        ("ratios", "split_bf16: fraction of in-place bandwidth"), at_least(0.85)),
    Row("adam", "Adam `split_int8` over the faster fp32 peer",
        ("ratios", "split_int8: speed-up over the faster fp32 peer"), at_least(1.7)),
    Row("adam", "Adam `split_int8`, fraction of the in-place bandwidth",
        ("ratios", "split_int8: fraction of in-place bandwidth"), at_least(0.85)),
    Row("formats", "last losses of `split_bf16` above fp32's, nats",
        ("summary", "split_bf16", "mean_excess_over_fp32"), at_most(0.02), SHARP),
    Row("formats", "last losses of `split_int8` above fp32's, nats",
        ("summary", "split_int8", "mean_excess_over_fp32"), at_most(0.02), SHARP),
    Row("hooks", "hooks, forward and backward, a module of 10,000",
        ("added_us_per_module", "forward + backward"), at_most(10), PER_MODULE),
    Row("hooks", "of it inside the core, with room for all",
        ("core", "ample", "ns_per_module"), at_most(0.4), MICROSECONDS),
    Row("hooks", "of it inside the core, room for 35%",
        ("core", "streaming 35%", "ns_per_module"), at_most(0.4), MICROSECONDS),
    Row("planner", "plans of 125,000 to 2,000,000 accesses that grow as n log n, and take under "
        "1 s for a million", ("results", "*", "met"), ALL),
    Row("copy_engines", "copies of 1 to 64 MiB within a tenth of memcpy",
        ("results", "*", "met", "*"), ALL),
    Row("build", "host memory at its peak / what stays there; eager, lazy, from_pretrained, 1.2B "
        "lazily", ("results", "*", "peak_over_final")),
    Row("build", "the same, within 1.05 and the largest tensor",
        ("results", "*", "within_target"), ALL),
    Row("build", "a 1.2B-parameter GPT-2 in fp32, built lazily and trained: resident memory at its "
        "peak", ("results", "lazy, large", "training", "peak_resident_bytes"), at_most(24), GIB),
    Row("build", "host memory of that one",
        ("results", "lazy, large", "final_host_bytes"), unit=GIB),
    Row("simulator", "step predicted / measured, five budgets with and without a link of 2 GB/s",
        ("results", "*", "ratio"), within(0.85, 1.15)),
    Row("simulator", "device bytes at their peak as predicted",
        ("results", "*", "peak_exact"), ALL),
)  # fmt: skip


def found(record: Any, path: Sequence[str | int]) -> list[Any]:
    """What stands at a path; KeyError or IndexError where there is nothing."""
    if not path:
        return list(record) if isinstance(record, list) else [record]
    key, rest = path[0], path[1:]
    if key == "*":
        values = record.values() if isinstance(record, dict) else record
        return [one for value in values for one in found(value, rest)]
    if isinstance(key, str) and key.endswith("*"):
        key = next((name for name in record if name.startswith(key[:-1])), key)
    return found(record[key], rest)


def figure(values: list[Any], unit: Unit) -> tuple[str, list[float]]:
    """In words, and the numbers that a target is about."""
    if all(isinstance(value, bool) for value in values):
        return f"{sum(values)} of {len(values)}", values
    numbers = [value["median"] if isinstance(value, dict) else value for value in values]
    numbers = [number / unit.of_record for number in numbers]
    words = ", ".join(map(unit.words, numbers))
    if len(values) == 1 and isinstance(values[0], dict) and "lower_quartile" in values[0]:
        ends = [values[0][f"{end}_quartile"] / unit.of_record for end in ("lower", "upper")]
        words += f" ({' to '.join(map(unit.words, ends))})"
    return words, numbers


def cells(row: Row, record: Record) -> tuple[str, ...]:
    """Of a row of a table."""
    target = row.target.words if row.target else ""
    try:
        values = [value for value in found(record, row.path) if value is not None]
    except (KeyError, IndexError):
        values = []
    if not values:
        return (row.what, MISSING, target, "")
    words, numbers = figure(values, row.unit)
    verdict = "" if row.target is None else "met" if row.target.meets(numbers) else "**missed**"
    return (row.what, words, target, verdict)


def origin(benchmark: str, record: Record) -> str:
    """Command, commit, day, processor and load of a record."""
    if not record:
        return f"`python benchmarks/{benchmark}.py`, {MISSING}:"
    command, machine = " ".join(record["command"]), record["machine"]
    changes = " with uncommitted changes" if machine["uncommitted_changes"] else ""
    return (
        f"`python benchmarks/{command}`, commit {machine['commit'][:8]}{changes}, "
        f"{machine['date'][:10]}, {machine['cpu']}, load {machine['load_average_1min']:.1f} before "
        "it:"
    )


def tables(results: Path) -> str:
    """A table for each benchmark of ROWS, from the records of a folder."""
    parts = []
    for benchmark, rows in groupby(ROWS, lambda row: row.benchmark):
        path = results / f"{benchmark}.json"
        record = json.loads(path.read_text("utf-8")) if path.exists() else {}
        lines = [HEADINGS, ("---",) * len(HEADINGS), *(cells(row, record) for row in rows)]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        parts.append(f"{origin(benchmark, record)}\n\n{table}")
    return "\n".join(parts)


def rewritten(page: str, results: Path) -> str:
    """The page with the tables between BEGIN and END made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no place for the tables: {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{tables(results)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8"), RESULTS), "utf-8")
    print(f"written to {PAGE}")
