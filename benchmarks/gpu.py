# Question: are castor's copies between host and device as fast as the link, and is its Adam kernel
#     bound by device memory and no slower than torch's?
# Baseline: (1) torch's `copy_(non_blocking=True)`, which is cudaMemcpyAsync, between the GPU and
#     memory that torch pinned, one way and both at once; (2) `a.add_(1)` in place, in bytes per
#     second, and torch.optim.AdamW(fused=True).
# Bytes: copies, what is copied; Adam, what the algorithm must move, each once: 28 per parameter in
#     fp32, 30 for a bf16 parameter with its fp32 master; the norm 4 and 2.
#     And does a training step that streams everything run as fast as one with all on the GPU?
#     (3) The same GPT-2 in bf16 with fp32 masters and moments, resident on the GPU, and under FSDP2
#     and DeepSpeed ZeRO-2 and ZeRO-3 with offload where they are installed, each in a process of
#     its own, at three numbers of tokens a step. Losses are held against the resident model's.
# Targets: copies >= 0.90 of the baseline; Adam >= 0.90 of the in-place bandwidth, no slower than
#     torch's; the streamed step >= 0.9 of the resident one's compute at 16k tokens and more.
"""Copies, kernels and training steps on a GPU: `python benchmarks/gpu.py [--numel N] ...`.

Parts may run one by one: what the output file holds of the same castor, torch and GPU is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _gpu_session import CONTENDERS, SEQUENCE, TOKENS, Load, compare, train
from _machine import command_line, describe_machine, output_of, paired, spread, write_record
from rich.console import Console
from rich.table import Table

from castor._loader import extension_path, load_cuda

HYPER = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}
BETA1, BETA2 = 0.9, 0.999
CHECKED = 1 << 20
PARTS = ["copies", "kernels", "steps"]


def seconds(work: Callable[[], object]) -> float:
    """Of work on the current stream, and of what it makes that stream wait for."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(
    contenders: dict[str, Callable[[], object]], repetitions: int
) -> dict[str, list[float]]:
    """Seconds of each, taking turns; one turn before does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions + 1):
        for name, work in contenders.items():
            elapsed = seconds(work)
            if repetition > 0:
                times[name].append(elapsed)
    return times


def copies(cuda: Any, num_bytes: int, repetitions: int) -> dict[str, Any]:
    """Seconds and ratios of host to device, device to host, and both at once."""
    engine, pinned, arena = cuda.CopyEngine(0), cuda.PinnedArena(0), cuda.DeviceArena(0)
    host, back = pinned.empty(num_bytes), pinned.empty(num_bytes)
    slot, source = arena.empty(num_bytes), arena.empty(num_bytes)
    peer_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    peer_back = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    peer_slot, peer_source = torch.empty_like(slot), torch.empty_like(source)
    other = torch.cuda.Stream()

    def into() -> None:
        engine.order(engine.submit(slot, host))

    def out() -> None:
        engine.wait(engine.submit(back, source))

    def both() -> None:
        ticket = engine.submit(slot, host)
        out()
        engine.order(ticket)

    def peer_both() -> None:
        other.wait_stream(torch.cuda.current_stream())
        peer_slot.copy_(peer_host, non_blocking=True)
        with torch.cuda.stream(other):
            peer_back.copy_(peer_source, non_blocking=True)
        torch.cuda.current_stream().wait_stream(other)

    times = measure(
        {
            "in": into,
            "torch_in": lambda: peer_slot.copy_(peer_host, non_blocking=True),
            "out": out,
            "torch_out": lambda: peer_back.copy_(peer_source, non_blocking=True),
            "both": both,
            "torch_both": peer_both,
        },
        repetitions,
    )
    host.random_()
    into()
    torch.cuda.synchronize()
    if not torch.equal(slot.cpu(), host):
        raise SystemExit("a copy to the device did not arrive whole")
    result: dict[str, Any] = {
        "bytes": num_bytes,
        "seconds": {k: spread(v) for k, v in times.items()},
    }
    for name in ("in", "out", "both"):
        result[f"{name}_over_torch"] = paired(times[f"torch_{name}"], times[name])
    result["bytes_per_second"] = {
        name: (2 if name.endswith("both") else 1) * num_bytes / spread(values)["median"]
        for name, values in times.items()
    }
    return result


def entry(param: torch.Tensor, grad: torch.Tensor) -> dict[str, Any]:
    """A parameter and fresh state, as adam_update takes them."""
    return {
        "param": param,
        "grad": grad,
        "exp_avg": torch.zeros_like(param, dtype=torch.float32),
        "exp_avg_sq": torch.zeros_like(param, dtype=torch.float32),
        "master": param if param.dtype == torch.float32 else param.float(),
        "beta1": BETA1,
        "beta2": BETA2,
        **HYPER,
        "decoupled": True,
        "format": "fp32",
    }


def check_first_step(initial: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor) -> None:
    """Compares the weights after one step with float64."""
    w, g = initial[:CHECKED].double(), grad[:CHECKED].double()
    w *= 1 - HYPER["lr"] * HYPER["weight_decay"]
    w -= HYPER["lr"] * g / (g.abs() + HYPER["eps"])
    error = ((weights[:CHECKED].double() - w).abs() / w.abs().clamp_min(1e-3)).max().item()
    if not error < 1e-5:
        raise SystemExit(f"the Adam kernel's weights are off by {error:.2e}, relative")


def kernels(cuda: Any, numel: int, repetitions: int) -> dict[str, Any]:
    """Adam and norm against torch and against device memory."""
    initial = torch.randn(numel, device="cuda")
    grad = torch.randn(numel, device="cuda")
    fp32 = entry(initial.clone(), grad)
    bf16 = entry(initial.bfloat16(), grad.bfloat16())
    peer = torch.nn.Parameter(initial.clone())
    peer.grad = grad
    fused = torch.optim.AdamW([peer], betas=(BETA1, BETA2), fused=True, **HYPER)
    cuda.adam_update([fp32 | {"step": 1}])
    check_first_step(initial, grad, fp32["param"])
    counts = {"adam_fp32": 1, "adam_bf16": 0}

    def step(name: str, state: dict[str, Any]) -> None:
        counts[name] += 1
        cuda.adam_update([state | {"step": counts[name]}])

    stream = torch.zeros(numel, device="cuda")
    times = measure(
        {
            "in_place": lambda: stream.add_(1),
            "adam_fp32": lambda: step("adam_fp32", fp32),
            "adam_bf16": lambda: step("adam_bf16", bf16),
            "torch_fused_fp32": fused.step,
            "norm_fp32": lambda: cuda.square_norms([grad]),
            "norm_bf16": lambda: cuda.square_norms([bf16["grad"]]),
        },
        repetitions,
    )
    norm = math.sqrt(cuda.square_norms([grad]).item())
    if not math.isclose(norm, grad.double().norm().item(), rel_tol=1e-9):
        raise SystemExit(f"the norm kernel gives {norm}")
    per_param = {"in_place": 8, "adam_fp32": 28, "adam_bf16": 30, "torch_fused_fp32": 28}
    per_param |= {"norm_fp32": 4, "norm_bf16": 2}
    bandwidth = {
        name: [count * numel / t for t in times[name]] for name, count in per_param.items()
    }
    return {
        "numel": numel,
        "seconds": {name: spread(values) for name, values in times.items()},
        "bytes_per_second": {name: spread(values) for name, values in bandwidth.items()},
        "fraction_of_in_place": {
            name: paired(bandwidth[name], bandwidth["in_place"])
            for name in per_param
            if name != "in_place"
        },
        "adam_fp32_over_torch": paired(times["torch_fused_fp32"], times["adam_fp32"]),
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what the file holds."""
    table = Table("what", "GB/s", "of its baseline")
    for name in ("in", "out", "both") if "copies" in result else ():
        rate = result["copies"]["bytes_per_second"][name]
        ratio = result["copies"][f"{name}_over_torch"]["median"]
        table.add_row(f"copy {name}", f"{rate / 1e9:.1f}", f"{ratio:.2f}")
    if "kernels" in result:
        for name, fraction in result["kernels"]["fraction_of_in_place"].items():
            rate = result["kernels"]["bytes_per_second"][name]["median"]
            table.add_row(name, f"{rate / 1e9:.1f}", f"{fraction['median']:.2f}")
        over = result["kernels"]["adam_fp32_over_torch"]["median"]
        table.add_row("adam_fp32, times torch's fused", "", f"{over:.2f}")
    if table.row_count:
        console.print(table)
    steps = Table("tokens a step", "contender", "tokens/s", "of compute", "GB/s in", "loss differs")
    for tokens, found in result.get("steps", {}).items():
        for name, one in found.items():
            if "seconds" not in one:
                why = one.get("error") or f"{one['missing']} is not installed"
                steps.add_row(tokens, name, why[:60], "", "", "")
                continue
            rate = one["of_a_step"].get("h2d_bytes", 0) / one["median_seconds"]
            share = f"{one['fraction_of_compute']:.2f}" if "fraction_of_compute" in one else ""
            differs = f"{one['loss_difference']:.1e}" if "loss_difference" in one else ""
            steps.add_row(
                tokens, name, f"{one['tokens_per_second']:.0f}", share, f"{rate / 1e9:.1f}", differs
            )  # fmt: skip
    if steps.row_count:
        console.print(steps)


def build_of_castor() -> str:
    """Tells builds apart: of what castor's modules hold."""
    modules = sorted(extension_path().parent.glob("_*.so"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in modules)).hexdigest()[:16]


def kept_of(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """The parts that a file holds, if they are of this castor, these versions and this GPU."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    same = ("castor_build", "versions", "gpu", "cuda_runtime")
    if any(found["machine"].get(key) != machine[key] for key in same):
        return {}
    return {key: found[key] for key in ("copies", "kernels", "steps") if key in found}


def main() -> None:
    parser = command_line("gpu", __doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--mebibytes", type=int, default=256, help="bytes of one copy")
    parser.add_argument("--numel", type=int, default=1 << 27, help="parameters of one Adam step")
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--width", type=int, default=2048, help="of the GPT-2 that is trained")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5, help="that are timed, of each contender")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    names = list(CONTENDERS)
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mebibytes, arguments.numel, arguments.repetitions = 1, CHECKED, 1
        arguments.width, arguments.layers, arguments.steps = 256, 2, 1
        arguments.tokens = [SEQUENCE]
    console = Console()
    if not torch.cuda.is_available():
        problem = "benchmarks/gpu.py: no CUDA device that torch can use"
        if os.environ.get("CASTOR_REQUIRE_CUDA") == "1":
            raise SystemExit(f"{problem} (CASTOR_REQUIRE_CUDA is 1)")
        print(f"SKIPPED: {problem}")
        return
    cuda = load_cuda()
    device = torch.cuda.get_device_properties(0)
    machine = describe_machine() | {
        "castor_build": build_of_castor(),
        "gpu": device.name,
        "gpu_memory_bytes": device.total_memory,
        "gpu_capability": f"{device.major}.{device.minor}",
        "cuda_runtime": cuda.runtime_version(),
    }
    result = kept_of(output_of(arguments, "gpu"), machine)

    def write() -> None:
        # After each part: whatever ends the next, what was measured is there.
        write_record(arguments, "gpu", result, machine=machine)

    if "copies" in arguments.part:
        result["copies"] = copies(cuda, arguments.mebibytes << 20, arguments.repetitions)
        write()
    if "kernels" in arguments.part:
        result["kernels"] = kernels(cuda, arguments.numel, arguments.repetitions)
        write()
    torch.cuda.empty_cache()
    problems, missing = [], []
    for tokens in arguments.tokens if "steps" in arguments.part else ():
        size = {"width": arguments.width, "layers": arguments.layers}
        load = Load(tokens=tokens, steps=arguments.steps, **size)
        found = result.setdefault("steps", {}).setdefault(str(tokens), {})
        for name in arguments.contenders:
            peak = found.get("deepspeed_zero2_offload", {}).get("peak_bytes")
            if name == "castor_at_zero2s_peak" and peak is None:
                missing.append(f"{name}: no peak of deepspeed_zero2_offload at {tokens} tokens")
                continue
            found[name] = train(name, replace(load, device_memory=peak))
            found[name]["parameters"] = load.parameters
            compare(found)
            write()
            problems += [f"{name}: {found[name]['error']}"] if "error" in found[name] else []
            missing += [f"{name}: no {found[name]['missing']}"] if "missing" in found[name] else []
    show(result, console)
    if problems:
        raise SystemExit("benchmarks/gpu.py: " + "; ".join(problems))
    if missing:
        print(f"SKIPPED: {'; '.join(missing)}")


if __name__ == "__main__":
    main()
