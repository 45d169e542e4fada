# Question: in how small a device budget does a model train when castor decides what becomes of its
#     activations and logits, and what does a step take there beside settings made by hand?
# Baseline: castor without either (activations="keep", tile_logits=False), in the same process; by
#     hand: keep all blocks, recompute all, every second, offload all.
# Models: GPT-2 of 42.5M parameters (vocabulary 8192) at 4 x 512 tokens, and a small Llama with a
#     vocabulary of 128,256 at 1 x 4096; fp32, the same seed and batches everywhere.
# Method: the smallest budget is bisected to 3% over two steps, the second by plan. At each budget
#     of a sweep, of the GPT-2, contenders step in turn; ratios are taken within a round.
#     The largest batch is bisected, in 1.5 times what the baseline needs for one sample.
#     Behind an emulated link of 2 GB/s each way, with room for everything: steps that offload all
#     blocks beside steps that keep all; the link is busy with what leaves, and with what returns.
# Targets: smallest budget at most 0.30 of the baseline's; step at most 1.05 of the best by hand;
#     largest batch at least 3 of the baseline's; offloaded behind the link at most 1.10 of the
#     longer of computing (keep all) and link.
"""Activations in a budget: `python benchmarks/activations.py [--quick]`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from _machine import command_line, describe_machine, paired, write_record
from _steps import QUICK, VOCAB, Model
from logits import LARGE_VOCABULARY, small_llama
from rich.console import Console
from rich.table import Table

from castor import Booster, GeminiPlugin, OutOfMemoryError
from castor.activations.blocks import find_blocks

BASELINE = {"activations": "keep", "tile_logits": False}
SMALLEST_TARGET, STEP_TARGET, BATCH_TARGET, LINK_TARGET = 0.30, 1.05, 3.0, 1.10
LINK_BYTES_PER_SECOND = 2_000_000_000
SHARES = (1.1, 2.0, 4.0)
"""Budgets of the sweep, in the smallest that trains; and one in which everything stays."""


class Contender:
    """A boosted model, and what its steps took."""

    def __init__(
        self, model: Any, vocabulary: int, tokens: tuple[int, int], budget: int, settings: Any
    ) -> None:
        self.model, self.vocabulary, self.tokens = model, vocabulary, tokens
        plugin = GeminiPlugin(
            device="cpu",
            device_memory=budget,
            host_memory="3GiB",
            precision="fp32",
            max_norm=1.0,
            **settings,
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.booster = Booster(plugin=plugin)
        self.booster.boost(model, self.optimizer)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """In which forward and backward run."""
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        """One step on the batch of that number, timed."""
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, self.vocabulary, self.tokens, generator=generator)
        gc.collect()
        start = time.perf_counter()
        with self.around():
            loss = self.model(input_ids=ids, labels=ids).loss
            self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


class Workload:
    """A model and its batches, and how far it is looked for what just trains."""

    def __init__(
        self,
        build: Callable[[], Any],
        vocabulary: int,
        tokens: tuple[int, int],
        *,
        resolution: float = 1.03,
        most: int = 64,
        shares: tuple[float, ...] = SHARES,
    ) -> None:
        self.build, self.vocabulary, self.tokens = build, vocabulary, tokens
        self.resolution, self.most, self.shares = resolution, most, shares
        self.blocks = list(find_blocks(build()))

    def contender(self, budget: int, settings: Any, batch: int | None = None) -> Contender:
        """A model boosted anew."""
        tokens = (batch or self.tokens[0], self.tokens[1])
        return Contender(self.build(), self.vocabulary, tokens, budget, settings)

    def trains(self, budget: int, settings: Any, batch: int | None = None) -> bool:
        """Whether two steps fit the budget, and nothing of them is left."""
        try:
            contender = self.contender(budget, settings, batch)
            for number in range(2):
                contender.step(number)
        except OutOfMemoryError:
            return False
        finally:
            contender = None
            gc.collect()
        return True

    def smallest(self, settings: Any, enough: int) -> int:
        """The smallest budget that trains, within the resolution; `enough` does."""
        low, high = enough // 64, enough
        while high > low * self.resolution:
            middle = int((low * high) ** 0.5)
            if self.trains(middle, settings):
                high = middle
            else:
                low = middle
        return high

    def largest(self, settings: Any, budget: int) -> int:
        """The largest batch that trains; at most `most`."""
        low, high = 0, self.most + 1
        while high - low > 1:
            middle = min(2 * low, self.most) if high > self.most else (low + high) // 2
            if self.trains(budget, settings, max(1, middle)):
                low = max(1, middle)
            else:
                high = max(1, middle)
        return low

    def by_hand(self) -> dict[str, Any]:
        """Settings that somebody may choose."""
        return {
            "keep": "keep",
            "recompute": "recompute",
            "every second": dict.fromkeys(self.blocks[::2], "recompute"),
            "offload": "offload",
        }

    def behind_link(self, rounds: int) -> dict[str, Any]:
        """Steps that offload every block over an emulated link; the first two are not timed."""
        contenders = {
            name: self.contender(
                8 << 30, {"activations": name, "link_bandwidth": LINK_BYTES_PER_SECOND}
            )
            for name in ("keep", "offload")
        }
        for number in range(rounds + 2):
            for contender in contenders.values():
                contender.step(number)
        keep, offload = contenders.values()
        if keep.losses != offload.losses:
            raise AssertionError("offloading changes the losses")
        moved = offload.booster.report(offload.model).offloaded_activation_bytes
        link = moved / LINK_BYTES_PER_SECOND
        ratio = paired(offload.seconds[2:], [max(s, link) for s in keep.seconds[2:]])
        return {
            "bytes_each_way": moved,
            "link_seconds": link,
            "keep_seconds": keep.seconds[2:],
            "offload_seconds": offload.seconds[2:],
            "step_ratio": ratio,
            "within_target": ratio["median"] <= LINK_TARGET,
        }

    def sweep(self, budget: int, rounds: int) -> dict[str, Any]:
        """Steps of "auto" and of what is made by hand, in turn; the first two are not timed."""
        contenders: dict[str, Contender] = {}
        for name, activations in ({"auto": "auto"} | self.by_hand()).items():
            try:
                contender = self.contender(budget, {"activations": activations})
                for number in range(2):
                    contender.step(number)
            except OutOfMemoryError:
                continue
            contenders[name] = contender
        for number in range(2, rounds + 2):
            for contender in contenders.values():
                contender.step(number)
        losses = {tuple(contender.losses) for contender in contenders.values()}
        if len(losses) > 1:
            raise AssertionError("activations change the losses")
        auto = contenders["auto"]
        report = auto.booster.report(auto.model)
        ratios = {
            name: paired(auto.seconds[2:], contender.seconds[2:])
            for name, contender in contenders.items()
            if name != "auto"
        }
        return {
            "budget_bytes": budget,
            "recomputed_blocks": report.recomputed_blocks,
            "offloaded_blocks": report.offloaded_blocks,
            "blocks": report.activation_blocks,
            "divergent_steps": report.divergent_steps,
            "step_ratio": ratios,
            "best_by_hand": max(ratios, key=lambda name: ratios[name]["median"]),
        }


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    """The smallest budgets and, if there are rounds, the sweep."""
    whole = workload.contender(8 << 30, BASELINE)
    for number in range(2):
        whole.step(number)
    report = whole.booster.report(whole.model)
    enough = int(1.2 * report.peak_nonmodel_bytes) + 4 * sum(
        p.numel() for p in whole.model.parameters()
    )
    del whole
    gc.collect()
    settings: dict[str, Any] = {"without": BASELINE, "tiles, auto": {"activations": "auto"}}
    if rounds:
        settings |= {"tiles": {}, "tiles, recompute": {"activations": "recompute"}}
    smallest = {name: workload.smallest(chosen, enough) for name, chosen in settings.items()}
    ratio = smallest["tiles, auto"] / smallest["without"]
    found = {
        "smallest_budget_bytes": smallest,
        "smallest_ratio": ratio,
        "smallest_within_target": ratio <= SMALLEST_TARGET,
    }
    if not rounds:
        return found
    budget = int(1.5 * smallest["without"] / workload.tokens[0])
    batches = {
        name: workload.largest(settings[name], budget) for name in ("without", "tiles, auto")
    }
    found |= {
        "largest_batch": batches | {"budget_bytes": budget},
        "batch_within_target": batches["tiles, auto"] >= BATCH_TARGET * batches["without"],
    }
    # "auto" fits where nothing by hand does, and has nothing to be compared with there.
    least = smallest["tiles, recompute"]
    budgets = [int(share * least) for share in workload.shares] + [8 << 30]
    sweep = [workload.sweep(budget, rounds) for budget in budgets]
    best = max(point["step_ratio"][point["best_by_hand"]]["median"] for point in sweep)
    return found | {
        "behind_link": workload.behind_link(rounds),
        "sweep": sweep,
        "largest_step_ratio": best,
        "steps_within_target": best <= STEP_TARGET,
    }


def main() -> None:
    parser = command_line("activations", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    gc.freeze()  # a collection looks through what steps make, not through what was imported
    machine, rounds = describe_machine(), 1 if args.quick else args.rounds
    model = QUICK if args.quick else Model(sequence=512)
    coarse: dict[str, Any] = {"resolution": 4.0, "most": 2, "shares": ()} if args.quick else {}
    deep = Workload(model.build, VOCAB, (model.rows, model.sequence), **coarse)
    results = {f"GPT-2, {model.layers} layers": measure(deep, rounds)}
    if not args.quick:
        wide = Workload(lambda: small_llama(128), LARGE_VOCABULARY, (1, 4096))
        results["Llama, 128k vocabulary"] = measure(wide, 0)
    for name, result in results.items():
        table = Table("budget", "recomputed", "offloaded", "auto / by hand", title=name)
        for point in result.get("sweep", ()):
            ratios = ", ".join(
                f"{other} {found['median']:.2f}" for other, found in point["step_ratio"].items()
            )
            counted = [
                f"{point[f'{kind}_blocks']} of {point['blocks']}"
                for kind in ("recomputed", "offloaded")
            ]
            table.add_row(f"{point['budget_bytes'] / 2**20:.0f} MiB", *counted, ratios)
        if "sweep" in result:
            Console().print(table)
        smallest = {k: round(v / 2**20, 1) for k, v in result["smallest_budget_bytes"].items()}
        if "largest_batch" in result:
            Console().print("largest batch:", result["largest_batch"])
            Console().print("behind a link of 2 GB/s:", result["behind_link"])
        Console().print("smallest budgets, MiB:", smallest, f"ratio {result['smallest_ratio']:.3f}")
    write_record(args, "activations", {"results": results}, machine=machine)


if __name__ == "__main__":
    main()
