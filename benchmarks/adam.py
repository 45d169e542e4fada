# Question: is castor's CPU Adam bound by memory alone, and is it at least as fast as the best other
#     CPU Adam, on one machine, in one process?
# Baseline: (1) the in-place stream `a[i] += 1` in castor's own threads, in bytes per second;
#     (2) DeepSpeedCPUAdam and torch.optim.AdamW(fused=True), fp32; (3) for bf16 training,
#     DeepSpeed's fp32 step plus the copy to bf16 parameters that its engine does after it.
# Bytes: what the algorithm must move, each once: fp32 28 per parameter (read g; read and write
#     w, m, v), bf16 30 (24 for the fp32 state; read g; read and write w16). The split formats of a
#     bf16 parameter (docs/design/0012): 26, 18 and 14 and the scales of split_int8.
# Targets: each format >= 0.85 of its bytes over the in-place bandwidth; split_bf16 >= 1.4 and
#     split_int8 >= 1.7 times the parameters per second of the faster fp32 peer.
# What each format costs a core whose data are in its second-level cache is measured by
#     benchmarks/cpp/adam.cc, for every instruction set the processor has.
"""CPU Adam against its peers: `python benchmarks/adam.py [--numel N] [--repetitions R]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by DeepSpeed when it is imported

import torch
from _cpp import build, can_build, run
from _machine import command_line, describe_machine, paired, spread, write_record
from _updates import Update, add_options, fractions, summary, take_turns, values
from rich.console import Console
from rich.table import Table

import castor
import castor._C

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
SPLIT_BYTES = {"split": 26, "split_bf16": 18, "split_int8": 14 + 16 / castor._C.MOMENT_BLOCK}
# Relative errors of the weights that are still rounding.
LIMITS = {"fp32": 1e-5, "bf16": 2.0**-8, "split": 1e-5, "split_bf16": 1e-4, "split_int8": 1e-3}
PEERS = ("torch", "deepspeed")
CHECKED = 1 << 20  # elements of each result that are compared with float64
CACHED, CACHED_REPETITIONS = 16384, 51


@dataclass(kw_only=True)
class Contender(Update):
    """One timed thing.

    `weights` holds the result, `working` a bf16 copy if there is one; `master` gives the fp32
    weights of the last elements where `weights` are bf16 and these are kept.
    """

    weights: torch.Tensor
    grad: torch.Tensor
    working: torch.Tensor | None = None
    master: Callable[[], torch.Tensor] | None = None
    limit: float = LIMITS["fp32"]


def parameter(values: torch.Tensor, grad: torch.Tensor) -> torch.nn.Parameter:
    result = torch.nn.Parameter(values.clone())
    result.grad = grad
    return result


def split_contender(
    state_format: str,
    bytes_per_param: float,
    initial: torch.Tensor,
    grad: torch.Tensor,
    hyper: dict[str, Any],
) -> Contender:
    p = parameter(initial.bfloat16(), grad)
    optimizer = castor.HybridAdam([p], optim_state_format=state_format, **hyper)
    return Contender(
        name=f"castor bf16, {state_format}",
        bytes_per_param=bytes_per_param,
        step=optimizer.step,
        weights=p.data,
        grad=grad,
        master=lambda: castor._C.join_master(
            p.data[-CHECKED:], optimizer.state[p]["remainder"][-CHECKED:]
        ),
        limit=LIMITS[state_format],
    )


def make_contenders(
    initial: torch.Tensor, grad: torch.Tensor, console: Console
) -> dict[str, Contender]:
    """Each starts from `initial` and keeps using `grad` (or its bf16 rounding)."""
    hyper: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    found = {}

    p = parameter(initial, grad)
    castor_fp32 = castor.HybridAdam([p], **hyper)
    found["castor"] = Contender(
        name="castor fp32", bytes_per_param=28, step=castor_fp32.step, weights=p.data, grad=grad
    )

    grad16 = grad.bfloat16()
    p16 = parameter(initial.bfloat16(), grad16)
    castor_bf16 = castor.HybridAdam([p16], **hyper)
    found["castor_bf16"] = Contender(
        name="castor bf16, gradient in and parameter out fused",
        bytes_per_param=30,
        step=castor_bf16.step,
        weights=p16.data,
        grad=grad16,
        master=lambda: castor_bf16.state[p16]["master"][-CHECKED:],
    )
    for state_format, bytes_per_param in SPLIT_BYTES.items():
        found[state_format] = split_contender(state_format, bytes_per_param, initial, grad16, hyper)

    q = parameter(initial, grad)
    fused = torch.optim.AdamW([q], fused=True, **hyper)
    found["torch"] = Contender(
        name="torch AdamW(fused=True) fp32",
        bytes_per_param=28,
        step=fused.step,
        weights=q.data,
        grad=grad,
    )

    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        console.print("[yellow]SKIPPED: DeepSpeedCPUAdam: deepspeed is not installed")
        return found
    d = parameter(initial, grad)
    deepspeed_fp32 = DeepSpeedCPUAdam([d], adamw_mode=True, **hyper)
    found["deepspeed"] = Contender(
        name="DeepSpeedCPUAdam fp32",
        bytes_per_param=28,
        step=deepspeed_fp32.step,
        weights=d.data,
        grad=grad,
    )
    e = parameter(initial, grad)
    d16 = torch.empty_like(initial, dtype=torch.bfloat16)
    deepspeed_copying = DeepSpeedCPUAdam([e], adamw_mode=True, **hyper)

    def step_and_copy_back() -> None:
        deepspeed_copying.step()
        d16.copy_(e.data)

    found["deepspeed_bf16"] = Contender(
        name="DeepSpeedCPUAdam fp32 + copy to bf16",
        bytes_per_param=34,  # and reads the fp32 weights again
        step=step_and_copy_back,
        weights=e.data,
        grad=grad,
        working=d16,
    )
    return found


def expected_weights(initial: torch.Tensor, grad: torch.Tensor, steps: int) -> torch.Tensor:
    """AdamW on one constant gradient, in float64."""
    w, g = initial.double(), grad.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(1, steps + 1):
        w -= LR * WEIGHT_DECAY * w
        m += (1 - BETAS[0]) * (g - m)
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        denominator = (v / (1 - BETAS[1] ** step)).sqrt() + EPS
        w -= LR / (1 - BETAS[0] ** step) * m / denominator
    return w


def verify(contender: Contender, initial: torch.Tensor) -> float:
    """Relative error against float64 on the last elements; raises where it is not rounding.

    Of the fp32 weights, where there are any.
    """
    start = initial.bfloat16() if contender.weights.dtype == torch.bfloat16 else initial
    expected = expected_weights(start[-CHECKED:], contender.grad[-CHECKED:], contender.calls)
    results = [result for result in (contender.weights, contender.working) if result is not None]
    if contender.master is not None:
        results.append(contender.master())
    worst = 0.0
    for result in results:
        error = float((result[-CHECKED:].double() - expected).norm() / expected.norm())
        limit = LIMITS["bf16"] if result.dtype == torch.bfloat16 else contender.limit
        if not error < limit:
            raise RuntimeError(f"{contender.name}: relative error {error:.2e} exceeds {limit:.2e}")
        if result.dtype != torch.bfloat16 or contender.master is None:
            worst = max(worst, error)
    return worst


def ratios(found: dict[str, Contender], bandwidth: list[float], numel: int) -> dict[str, Any]:
    """What the targets are stated in: larger is better for castor."""
    castor_fp32, castor_bf16 = found["castor"], found["castor_bf16"]
    result = fractions(found, ("castor", "castor_bf16", *SPLIT_BYTES), bandwidth, numel)
    peers = [found[peer] for peer in PEERS if peer in found]
    for peer in PEERS:
        if peer in found:
            result[f"castor: speed-up over {peer}"] = paired(
                found[peer].seconds, castor_fp32.seconds
            )
    fastest = [min(seconds) for seconds in zip(*(p.seconds for p in peers), strict=True)]
    for key in SPLIT_BYTES:
        result[f"{key}: speed-up over the faster fp32 peer"] = paired(fastest, found[key].seconds)
    if "deepspeed_bf16" in found:
        result["castor_bf16: speed-up over deepspeed + copy"] = paired(
            found["deepspeed_bf16"].seconds, castor_bf16.seconds
        )
    return result


def in_cache(repetitions: int, console: Console) -> list[dict[str, Any]]:
    """Nanoseconds per 16 elements, by instruction set and format; none without CMake."""
    if not can_build():
        console.print("[yellow]SKIPPED: one core with its data in cache: cmake is not installed")
        return []
    found = run(build("adam"), CACHED, repetitions)["ns_per_16"]
    results = [entry | {"ns": spread(entry["ns"])} for entry in found]
    formats = list(dict.fromkeys(entry["format"] for entry in results))
    table = Table(title=f"ns per 16 elements: bf16, one core, {CACHED:,} parameters in its cache")
    for heading in ("", *formats):
        table.add_column(heading, justify="left" if not heading else "right")
    for isa in dict.fromkeys(entry["isa"] for entry in results):
        row = [entry["ns"]["median"] for entry in results if entry["isa"] == isa]
        table.add_row(isa, *(f"{value:.1f}" for value in row))
    console.print(table)
    return results


def main() -> int:
    parser = command_line("adam", __doc__)
    add_options(parser)
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine() | {"torch_num_threads": torch.get_num_threads()}

    numel, repetitions = arguments.numel, arguments.repetitions
    if arguments.quick:
        numel, repetitions = CHECKED, 1
    initial, grad = values(numel)
    found = make_contenders(initial, grad, console)
    bandwidth = take_turns(list(found.values()), numel, repetitions)
    errors = {key: verify(contender, initial) for key, contender in found.items()}

    title = f"Adam step, {numel:,} parameters, {repetitions} runs"
    table, figures = summary(found, bandwidth, numel, title, errors)
    console.print(table)

    pairs = Table(title="paired within each repetition: median (quartiles)")
    pairs.add_column("")
    pairs.add_column("ratio", justify="right")
    compared = ratios(found, bandwidth, numel)
    for name, r in compared.items():
        quartiles = f"{r['lower_quartile']:.3f} - {r['upper_quartile']:.3f}"
        pairs.add_row(name, f"{r['median']:.3f} ({quartiles})")
    console.print(pairs)

    figures |= {
        "ratios": compared,
        "in_cache_ns_per_16": in_cache(3 if arguments.quick else CACHED_REPETITIONS, console),
    }
    write_record(arguments, "adam", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
