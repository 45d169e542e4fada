# Question: what does a step of SGD or Lion cost that runs fused on chunks, and is it bound by
#     memory alone as Adam's is (benchmarks/adam.py)?
# Baseline: (1) the in-place stream `a[i] += 1` in castor's own threads, in bytes per second;
#     (2) torch.optim.SGD(fused=True) and (foreach=True), and castor.optim.Lion without a booster,
#     all in fp32.
# Bytes: what the algorithm must move, each once: SGD 12 per parameter (read g; read and write w),
#     with momentum 20 (and read and write the buffer), Lion 20; "split" bf16 parameters with
#     momentum 18 (2 of g, 4 of the parameter, 4 of the remainder, 8 of the buffer).
# A step is optimizer.step() of a boosted model of one parameter, without a norm, all of what step
#     does included; the results are compared with torch's, bit for bit where castor promises it.
"""Fused rules beside torch's steps: `python benchmarks/rules.py [--numel N] [--repetitions R]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _machine import command_line, describe_machine, paired, write_record
from _updates import Update, add_options, fractions, summary, take_turns, values
from rich.console import Console
from torch import nn
from torch.optim import SGD, Optimizer

from castor import Booster, GeminiPlugin
from castor.optim import Lion

PLAIN: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01}
MOMENTUM: dict[str, Any] = {**PLAIN, "momentum": 0.9}
LION: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
FUSED_LIMIT = 1e-5  # relative error of torch's fused kernel, which rounds in another order


class Weights(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self, initial: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial.clone())

    def forward(self, grad: torch.Tensor) -> torch.Tensor:
        """What to differentiate."""
        return (self.weight * grad.to(self.weight.dtype)).sum()


@dataclass(kw_only=True)
class Contender(Update):
    """One timed thing, and the weights that it leaves."""

    weights: Callable[[], torch.Tensor]


Make = Callable[[Any], Optimizer]


def plain(
    name: str, bytes_per_param: float, make: Make, initial: torch.Tensor, grad: torch.Tensor
) -> Contender:
    param = nn.Parameter(initial.clone())
    param.grad = grad
    return Contender(
        name=name,
        bytes_per_param=bytes_per_param,
        step=make([param]).step,
        weights=lambda: param.detach(),
    )


def boosted(
    name: str,
    bytes_per_param: float,
    make: Make,
    initial: torch.Tensor,
    grad: torch.Tensor,
    precision: str = "fp32",
) -> Contender:
    model = Weights(initial)
    booster = Booster(
        GeminiPlugin(
            device="cpu",
            device_memory=64 * initial.numel() + (1 << 20),
            placement_policy="cpu",
            precision=precision,
            nonfinite="ignore",
        )
    )
    model, optimizer, *_ = booster.boost(model, make(model.parameters()))
    booster.backward(model(grad), optimizer)  # steps leave the gradient where it is
    return Contender(
        name=f"castor {name}",
        bytes_per_param=bytes_per_param,
        step=optimizer.step,
        weights=lambda: model.weight.detach(),
    )


def make_contenders(initial: torch.Tensor, grad: torch.Tensor) -> dict[str, Contender]:
    def torch_sgd(name: str, bytes_per_param: float, **options: Any) -> Contender:
        make: Make = lambda params: SGD(params, **options)  # noqa: E731
        return plain(f"torch {name}", bytes_per_param, make, initial, grad)

    return {
        "sgd": boosted("SGD", 12, lambda params: SGD(params, **PLAIN), initial, grad),
        "sgd_momentum": boosted(
            "SGD, momentum", 20, lambda params: SGD(params, **MOMENTUM), initial, grad
        ),
        "sgd_momentum_split": boosted(
            "SGD, momentum, bf16 split",
            18,
            lambda params: SGD(params, **MOMENTUM),
            initial,
            grad,
            precision="bf16",
        ),
        "lion": boosted("Lion", 20, lambda params: Lion(params, **LION), initial, grad),
        "torch_fused": torch_sgd("SGD(fused=True)", 12, fused=True, **PLAIN),
        "torch_foreach": torch_sgd("SGD(foreach=True)", 12, foreach=True, **PLAIN),
        "torch_fused_momentum": torch_sgd("SGD(fused=True), momentum", 20, fused=True, **MOMENTUM),
        "torch_foreach_momentum": torch_sgd(
            "SGD(foreach=True), momentum", 20, foreach=True, **MOMENTUM
        ),
        "plain_lion": plain(
            "Lion without a booster", 20, lambda params: Lion(params, **LION), initial, grad
        ),
    }


def verify(found: dict[str, Contender]) -> None:
    """Compares the weights; raises where castor's are not torch's."""
    for mine, theirs in (
        ("sgd", "torch_foreach"),
        ("sgd_momentum", "torch_foreach_momentum"),
        ("lion", "plain_lion"),
    ):
        if not torch.equal(found[mine].weights(), found[theirs].weights()):
            raise RuntimeError(f"{found[mine].name} has other weights than {found[theirs].name}")
    for mine, theirs in (("sgd", "torch_fused"), ("sgd_momentum", "torch_fused_momentum")):
        a, b = found[mine].weights(), found[theirs].weights()
        error = float((a - b).norm() / b.norm())
        if not error < FUSED_LIMIT:
            raise RuntimeError(f"{found[theirs].name} is {error:.1e} away from {found[mine].name}")
    exact = found["sgd_momentum"].weights()
    error = float((found["sgd_momentum_split"].weights().float() - exact).norm() / exact.norm())
    if not error < 2.0**-7:
        raise RuntimeError(f"{found['sgd_momentum_split'].name} is {error:.1e} away from fp32")


RATIOS = {
    "sgd: speed-up over torch's fused": ("torch_fused", "sgd"),
    "sgd: speed-up over torch's foreach": ("torch_foreach", "sgd"),
    "sgd_momentum: speed-up over torch's fused": ("torch_fused_momentum", "sgd_momentum"),
    "sgd_momentum: speed-up over torch's foreach": ("torch_foreach_momentum", "sgd_momentum"),
    "lion: speed-up over its own step": ("plain_lion", "lion"),
}


def ratios(found: dict[str, Contender], bandwidth: list[float], numel: int) -> dict[str, Any]:
    """Larger is better for castor."""
    of_castor = ("sgd", "sgd_momentum", "sgd_momentum_split", "lion")
    result = fractions(found, of_castor, bandwidth, numel)
    for name, (theirs, mine) in RATIOS.items():
        result[name] = paired(found[theirs].seconds, found[mine].seconds)
    return result


def main() -> int:
    parser = command_line("rules", __doc__)
    add_options(parser)
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine() | {"torch_num_threads": torch.get_num_threads()}

    numel, repetitions = arguments.numel, arguments.repetitions
    if arguments.quick:
        numel, repetitions = 1 << 20, 1
    found = make_contenders(*values(numel))
    bandwidth = take_turns(list(found.values()), numel, repetitions)
    verify(found)

    title = f"step, {numel:,} parameters, {repetitions} runs"
    table, figures = summary(found, bandwidth, numel, title)
    console.print(table)
    compared = ratios(found, bandwidth, numel)
    for name, r in compared.items():
        console.print(
            f"{name}: {r['median']:.2f} ({r['lower_quartile']:.2f} - {r['upper_quartile']:.2f})"
        )
    write_record(arguments, "rules", figures | {"ratios": compared}, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
