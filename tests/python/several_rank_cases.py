"""What tests of several optimizers run on ranks: `python several_rank_cases.py NAME DIRECTORY`.

See rank_cases.py for how a test runs them.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import castor
import grids
import helpers
from castor.runtime.engine import engine_of
from rank_cases import _frozen, _of_rank, _refused, _uneven
from simulated import compute_as_asked
from zoo import CASES, Tower, tower, tower_batch, tower_loss

STEPS = grids.steps(10)
SMALL = {"chunk_bytes": "8KiB"}
"""Several chunks of a tower."""

Make = Callable[[nn.Module], list[Optimizer]]


def muon_and_hybrid(model: nn.Module) -> list[Optimizer]:
    """Matrices of the blocks to Muon, all else to HybridAdam."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if p.ndim == 2 and _in_block(n)]
    others = [p for n, p in trained if p.ndim != 2 or not _in_block(n)]
    assert matrices
    assert others
    return [Muon(matrices, lr=1e-2), castor.HybridAdam(others, lr=1e-2, weight_decay=0.1)]


def hybrid_and_muon(model: nn.Module) -> list[Optimizer]:
    return muon_and_hybrid(model)[::-1]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    muon, hybrid = muon_and_hybrid(model)
    return [muon, AdamW(hybrid.param_groups[0]["params"], lr=1e-2)]


def adafactor_and_sgd(model: Any) -> list[Optimizer]:
    return [
        Adafactor(model.layers.parameters(), lr=1e-2),
        SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    ]


def two_adamw(model: Any) -> list[Optimizer]:
    return [
        AdamW(model.layers.parameters(), lr=1e-3, weight_decay=0.1),
        AdamW(model.head.parameters(), lr=2e-3),
    ]


def _in_block(name: str) -> bool:
    return ".h." in name or "layers." in name


def _all(step: int) -> tuple[int, ...]:
    return (0, 1)


def _the_first(step: int) -> tuple[int, ...]:
    return (0,)


def _in_turn(step: int) -> tuple[int, ...]:
    """As a generator and its critic."""
    return (step % 2,)


def _seldom(step: int) -> tuple[int, ...]:
    """The second one every other step, and first where it does."""
    return (1, 0) if step % 2 else (0,)


@dataclass(frozen=True)
class SeveralCase:
    """A model, its optimizers, which of them step when, and settings."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    make: Make
    settings: dict[str, Any] = field(default_factory=dict)
    stepping: Callable[[int], tuple[int, ...]] = _all
    deferred: bool = False
    """Whether there are two micro-batches, the first under no_sync."""
    keeps: bool = False
    """Whether gradients of one that does not step stay, and those of later passes are added."""
    scheduled: bool = False
    """Whether learning rates change."""


def _zoo(name: str, make: Make, **settings: Any) -> SeveralCase:
    case = CASES[name]

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        batch = case.batch(seed)
        return case.loss(model(**batch), batch)

    return SeveralCase(case.model, loss, make, settings)


def _tower(make: Make, settings: dict[str, Any] = SMALL, **kwargs: Any) -> SeveralCase:
    return SeveralCase(tower, tower_loss, make, settings, **kwargs)


def _uneven_loss(model: nn.Module, seed: int) -> torch.Tensor:
    """Rank 1 skips a layer."""
    loss: torch.Tensor = model(**tower_batch(seed), skip=2 if seed % 10 == 1 else None)
    return loss


EXACT = {
    "muon and hybrid, gpt2": _zoo("gpt2", muon_and_hybrid),
    "hybrid and muon, llama": _zoo("llama", hybrid_and_muon),
    "muon and adamw, llama": _zoo("llama", muon_and_adamw, activations="recompute"),
    "unclipped": _zoo("gpt2", muon_and_hybrid, max_norm=0.0),
    "adafactor and sgd": _tower(adafactor_and_sgd),
    "two adamw, tight": _tower(two_adamw, SMALL | {"memory": 24 << 10}),
    "stage 2": _tower(two_adamw, SMALL | {"zero_stage": 2}, stepping=_in_turn),
    "stage 3": _tower(two_adamw, SMALL | {"zero_stage": 3}, stepping=_seldom),
    "muon and hybrid, tight": _tower(muon_and_hybrid, SMALL | {"memory": 24 << 10}),
    "frozen": replace(_zoo("gpt2", muon_and_hybrid), build=_frozen),
    "uneven": SeveralCase(_uneven, _uneven_loss, muon_and_hybrid, SMALL),
    "in turn": _tower(muon_and_hybrid, stepping=_in_turn),
    "seldom": _tower(muon_and_hybrid, stepping=_seldom),
    "scheduled": _tower(muon_and_hybrid, scheduled=True),
}
"""fp32: the bits of one process with as many micro-batches."""

CLOSE = {
    "deferred": _tower(muon_and_hybrid, deferred=True),
    "keeps": _tower(adafactor_and_sgd, stepping=_in_turn, keeps=True),
    "bf16": _zoo("gpt2", muon_and_hybrid, precision="bf16"),
    "bf16, split_int8": _zoo(
        "llama", hybrid_and_muon, precision="bf16", optim_state_format="split_int8"
    ),
    "fp16": _zoo("gpt2", muon_and_hybrid, precision="fp16", initial_scale=2.0**8),
}
"""Sums in another order: the same bits on every rank."""

ON_TWO = grids.some(
    EXACT,
    *("muon and hybrid, gpt2", "muon and adamw, llama", "adafactor and sgd", "two adamw, tight"),
    *("stage 2", "muon and hybrid, tight", "uneven", "seldom", "scheduled"),
)
CLOSE_ON_TWO = grids.some(CLOSE, "deferred", "keeps", "bf16, split_int8")
ON_SEVERAL = (
    *("muon and hybrid, gpt2", "adafactor and sgd", "two adamw, tight"),
    *("muon and hybrid, tight", "seldom", "stage 2", "stage 3", "uneven"),
)
OVER_THE_GROUP = grids.some(ON_SEVERAL, "adafactor and sgd", "seldom", "stage 2", "stage 3")
ON_NODES = grids.some((*ON_SEVERAL, "in turn"), "adafactor and sgd", "stage 3", "in turn")


@dataclass
class Run:
    """A boosted model of a case."""

    case: SeveralCase
    booster: castor.Booster
    model: Any
    optimizers: list[Optimizer]
    schedulers: list[LambdaLR]

    def step(self, step: int, seeds: Sequence[int]) -> list[float]:
        """One, of the mean of micro-batches in this process."""
        losses = []
        for micro in range(2 if self.case.deferred else 1):
            for seed in seeds:
                later = self.case.deferred and (micro == 0 or seed != seeds[-1])
                with self.booster.no_sync(self.model) if later else nullcontext():
                    loss = self.case.loss(self.model, seed + 10 * micro)
                    self.booster.backward(loss / len(seeds), self.optimizers[0])
                losses.append(loss.item())
        stepping = self.case.stepping(step)
        for k in stepping:
            self.optimizers[k].step()
        for k in stepping if self.case.keeps else range(len(self.optimizers)):
            self.optimizers[k].zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        return losses

    def weights(self) -> list[torch.Tensor]:
        return helpers.copies(self.model.parameters())


def boost(case: SeveralCase, **settings: Any) -> Run:
    model = case.build()
    optimizers = case.make(model)
    schedulers = [
        LambdaLR(one, lambda step, k=k: 1 / (1 + step + k))  # type: ignore[misc]
        for k, one in enumerate(optimizers if case.scheduled else [])
    ]
    chosen = {"memory": helpers.GIB, "max_norm": 0.5} | case.settings | settings
    booster = castor.Booster(plugin=helpers.plugin(**chosen))
    booster.boost(model, optimizers)
    return Run(case, booster, model, optimizers, schedulers)


def train(
    case: SeveralCase, ranks: Sequence[int], *, steps: int = STEPS
) -> tuple[list[torch.Tensor], list[float], castor.MemoryReport]:
    """Weights, losses and report; `ranks`: whose micro-batches this process takes."""
    run = boost(case)
    losses = []
    for step in range(steps):
        losses += run.step(step, [1000 * step + rank for rank in ranks])
    return run.weights(), losses, run.booster.report(run.model)


def _train_all(names: Sequence[str], directory: Path) -> None:
    with _of_rank() as rank:
        for name in names:
            weights, losses, report = train((EXACT | CLOSE)[name], (rank,))
            torch.save((weights, losses, vars(report)), directory / f"{name}.{rank}.pt")


def each(directory: Path) -> None:
    _train_all([*ON_TWO, *CLOSE_ON_TWO], directory)


def over_the_group(directory: Path) -> None:
    os.environ["CASTOR_RANK_LINK"] = "group"
    _train_all(OVER_THE_GROUP, directory)


def on_nodes(directory: Path) -> None:
    _train_all(ON_NODES, directory)


ON_GPUS = {
    name: replace(EXACT[name], settings=SMALL)
    for name in ("adafactor and sgd", "two adamw, tight", "muon and hybrid, tight", "seldom")
}
"""With as much memory as they like."""


def on_gpus(directory: Path) -> None:
    """On the device that CASTOR_TEST_DEVICE says."""
    with _of_rank() as rank:
        for name, case in ON_GPUS.items():
            weights, losses, report = train(case, (rank,), steps=5)
            kept = [weight.cpu() for weight in weights]
            torch.save((kept, losses, vars(report)), directory / f"{name}.{rank}.pt")


GOING_ON = {
    precision: _zoo("gpt2", muon_and_hybrid, precision=precision) for precision in ("fp32", "bf16")
}


def comparable(size: int) -> list[str]:
    """Whose bits are the same on so many ranks as in one process, of one mean.

    A third of three times it is it in bf16, whose sums are float32.
    """
    return [*GOING_ON] if size < 3 else ["bf16"]


def saves(directory: Path) -> None:
    """Of three steps of the mean that one process has; and where it goes from there."""
    with _of_rank() as rank:
        for precision, case in GOING_ON.items():
            run = boost(case)
            for step in range(3):
                run.step(step, [step])
            run.booster.save(directory / f"run {precision}", run.model, run.optimizers)
            print(_refused(lambda: _save_beside(run, directory / "late")))  # noqa: B023
            for k, optimizer in enumerate(run.optimizers):
                path = directory / f"{precision}-{k}"
                run.booster.save_optimizer(optimizer, path, model=run.model)
                run.booster.load_optimizer(optimizer, path, model=run.model)
            states = [one.state_dict()["state"] for one in run.optimizers]
            torch.save(states, directory / f"states {precision}.{rank}.pt")
            for step in range(3, 5):
                run.step(step, [step])
            torch.save(run.weights(), directory / f"weights {precision}.{rank}.pt")


def _save_beside(run: Run, path: Path) -> None:
    run.booster.save(path, run.model, run.optimizers, use_async=True)


def loads(directory: Path) -> None:
    """Goes on where `saves` saved, on as many ranks as there are."""
    with _of_rank() as rank:
        for precision in comparable(distributed.get_world_size()):
            case = GOING_ON[precision]
            run = boost(case)
            found = run.booster.load(directory / f"run {precision}", run.model, run.optimizers)
            assert not isinstance(found, list)
            for step in range(found.step, 5):
                run.step(step, [step])
            torch.save(run.weights(), directory / f"loaded {precision}.{rank}.pt")


def saves_beside(directory: Path) -> None:
    """Two that run fused are written beside the training."""
    with _of_rank() as rank:
        run = boost(EXACT["two adamw, tight"])
        for step in range(2):
            run.step(step, [10 * step + rank])
        run.booster.save(directory / "at once", run.model, run.optimizers)
        _save_beside(run, directory / "beside")
        run.step(2, [20 + rank])
        run.booster.wait_for_saves()


def overflow_on_one(directory: Path) -> None:
    """A gradient of rank 1 is not finite at the second step, which all leave out."""
    with _of_rank() as rank:
        for name, settings in (
            ("fp16", {"precision": "fp16", "initial_scale": 256.0}),
            ("fp32", {}),
        ):
            run = boost(_tower(muon_and_hybrid), **settings)
            for step in range(3):
                before = run.weights()
                batch = tower_batch(10 * step + rank)
                if step == 1 and rank == 1:
                    batch["x"][0, 0] = float("inf")
                run.booster.backward(run.model(**batch), run.optimizers[0])
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for optimizer in run.optimizers[:: 1 if step else -1]:
                        optimizer.step()
                        optimizer.zero_grad()
                same = all(map(torch.equal, before, run.weights()))
                skipped = run.booster.report(run.model).skipped_steps
                print(name, step, same, skipped, run.optimizers[1]._castor.loss_scale)  # type: ignore[attr-defined]
            torch.save(run.weights(), directory / f"{name}.{rank}.pt")


def different_lists(_: Path) -> None:
    """Each is refused on every rank, soon."""
    with _of_rank() as rank:
        order: tuple[Make, Make] = (muon_and_hybrid, hybrid_and_muon)
        makes: list[tuple[Make, Make]] = [
            order,
            (two_adamw, lambda model: [*two_adamw(model)[:1], _head(model)]),
            (two_adamw, lambda model: [AdamW(model.parameters(), lr=1e-3)]),
            (_of_layer(0), _of_layer(1)),
        ]
        for pair in makes:
            model = tower()
            optimizers = pair[rank](model)
            booster = castor.Booster(plugin=helpers.plugin())
            distributed.barrier()
            begun = time.monotonic()
            said = _refused(lambda: booster.boost(model, optimizers))  # noqa: B023
            print(time.monotonic() - begun < 30, said)


def _head(model: Any) -> Optimizer:
    return AdamW(model.head.parameters(), lr=1e-4)


def _of_layer(index: int) -> Make:
    """Halves that have as many parameters, whichever layer is the first one's."""

    def make(model: Any) -> list[Optimizer]:
        one = list(model.layers[index].parameters())
        others = [p for p in model.parameters() if not any(p is mine for mine in one)]
        return [AdamW(one, lr=1e-3), AdamW(others, lr=1e-3)]

    return make


def different_steps(_: Path) -> None:
    """Rank 0 steps the first one where rank 1 steps the second."""
    with _of_rank() as rank:
        run = boost(_tower(muon_and_hybrid))
        run.booster.backward(tower_loss(run.model, rank), run.optimizers[0])
        print(_refused(run.optimizers[rank].step))


def one_steps_more(_: Path) -> None:
    """Rank 0 steps both where rank 1 goes on to the next pass after one."""
    with _of_rank() as rank:
        run = boost(_tower(muon_and_hybrid))
        run.booster.backward(tower_loss(run.model, rank), run.optimizers[0])
        run.optimizers[0].step()
        if rank == 0:
            print(_refused(run.optimizers[1].step))
        else:
            print(
                _refused(lambda: run.booster.backward(tower_loss(run.model, 2), run.optimizers[0]))
            )


class Noisy(Optimizer):
    """Gradient descent with noise; one weight of rank 1 may be wrong once."""

    def __init__(self, params: Any, *, noise: float, wrong_at: int | None = None) -> None:
        self._steps, self._wrong_at = 0, wrong_at
        super().__init__(params, {"noise": noise})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        wrong = self._steps == self._wrong_at and distributed.get_rank() == 1
        self._steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                param -= 1e-3 * param.grad + group["noise"] * torch.randn_like(param)
            if wrong:
                group["params"][-1].view(-1)[-1] += 1e-3


NOTHING = "nothing was raised"
DRIFTS: dict[str, Any] = {
    "alike": {"noise": 1e-4},
    "seeded by rank": {"noise": 1e-4},
    "wrong once": {"noise": 0.0, "wrong_at": 2},
}


def drifts(_: Path) -> None:
    """Prints how many steps each took, of 12, and what it said then."""
    with _of_rank() as rank:
        for name, options in DRIFTS.items():
            for settings in ({}, {"precision": "bf16"}, {"max_norm": 0.0}):
                beside = "max_norm" in settings

                def make(model: Any, options: Any = options, beside: bool = beside) -> Any:
                    noisy = Noisy(model.layers[1].parameters() if beside else model.parameters(),
                                  **options)  # fmt: skip
                    taken = {id(p) for p in noisy.param_groups[0]["params"]}
                    others = [p for p in model.parameters() if id(p) not in taken]
                    return [noisy, castor.HybridAdam(others)] if others else [noisy]

                stepping = _all if beside else _the_first
                run = boost(_tower(make, stepping=stepping), **settings)
                torch.manual_seed(rank if name == "seeded by rank" else 0)
                steps, said = 0, NOTHING
                while steps < 12 and said == NOTHING:
                    said = _refused(lambda: run.step(steps, [10 * steps + rank]))  # noqa: B023
                    steps += 1
                print(name, "|", steps, "|", said)


def kept(directory: Path) -> None:
    """Which chunks ranks have once, and what a rank pays."""
    with _of_rank() as rank:
        wide = SeveralCase(
            lambda: tower(width=128),
            lambda model, seed: model(**tower_batch(seed, width=128)),  # type: ignore[no-any-return]
            muon_and_hybrid,
        )
        reports = []
        for link in ("auto", "group"):
            os.environ["CASTOR_RANK_LINK"] = link
            run = boost(wide, placement_policy="cpu")
            for step in range(2):
                run.step(step, [10 * step + rank])
            reports.append(vars(run.booster.report(run.model)))
        engine = engine_of(run.model)
        once = sum(
            chunk["used_bytes"]
            for chunk in engine.session.chunks()
            if any(not _is_muons(engine.names[param]) for param in chunk["params"])
        )
        torch.save((*reports, once), directory / f"kept.{rank}.pt")


def _is_muons(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(".weight")


def of_decay(model: nn.Module) -> list[Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return [AdamW(matrices, lr=1e-3, weight_decay=0.1), AdamW(others, lr=2e-3)]


def boost_sharded(make: Make, **settings: Any) -> Run:
    """A llama of which ranks have parts."""
    case = _zoo("llama", make)
    model = case.build()
    optimizers = make(model)
    plugin = castor.HybridParallelPlugin(
        device="cpu", device_memory=helpers.GIB, host_memory=helpers.GIB, max_norm=0.5, **settings
    )
    booster = castor.Booster(plugin)
    booster.boost(model, optimizers)
    return Run(case, booster, model, optimizers, [])


DIVIDED: dict[str, tuple[Make, float]] = {
    "tp_size": (of_decay, 1e-5),
    # Muon's bfloat16 makes a last bit of a gradient one of an update's eight.
    "sp_size": (muon_and_hybrid, 3e-4),
}
"""Optimizers, and how far losses may be from those of one process, relative."""


def divided(directory: Path) -> None:
    """Two ranks have parts of layers, or compute half the tokens with whole ones."""
    with _of_rank() as rank:
        for name, (make, _) in DIVIDED.items():
            run = boost_sharded(make, **{name: 2})
            losses = [run.step(step, [step])[0] for step in range(3)]
            run.booster.save(directory / name, run.model, run.optimizers)
            losses += [run.step(step, [step])[0] for step in range(3, 6)]
            found = run.booster.load(directory / name, run.model, run.optimizers)
            assert not isinstance(found, list)
            losses += [run.step(step, [step])[0] for step in range(found.step, 6)]
            torch.save(losses, directory / f"{name}.{rank}.pt")
        mixed: list[tuple[Make, dict[str, int]]] = [
            (muon_and_hybrid, {"tp_size": 2}),
            (lambda model: [of_decay(model)[0], SGD(_vectors(model), lr=0.1)], {"tp_size": 2}),
            (of_decay, {"pp_size": 2, "num_microbatches": 2}),
        ]
        for unfit, sizes in mixed:
            print(_refused(lambda: boost_sharded(unfit, **sizes)))  # noqa: B023


def _vectors(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim != 2]


def refused(_: Path) -> None:
    with _of_rank():
        for settings in (
            {"zero_stage": 2},
            {"zero_stage": 3},
            {"overlap": "forward"},
        ):
            case = _tower(muon_and_hybrid)
            print(_refused(lambda: boost(case, **settings)))  # noqa: B023
        plugin = castor.LowLevelZeroPlugin(
            device="cpu", device_memory=helpers.GIB, host_memory=helpers.GIB, stage=2,
            cpu_offload=True,
        )  # fmt: skip
        model = Tower()
        print(_refused(lambda: castor.Booster(plugin).boost(model, muon_and_hybrid(model))))


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    globals()[sys.argv[1]](Path(sys.argv[2]))
