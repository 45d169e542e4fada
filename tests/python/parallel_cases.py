"""What tests of every way to divide run on ranks: `python parallel_cases.py NAME DIRECTORY`.

As in tensor_cases: a scenario is a function of the directory that the ranks share.
"""

import gc
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed, nn

import as_rank
import castor
import pipeline_cases
from castor.activations import auto as auto_activations
from castor.activations.choices import Choice, Decisions
from castor.optim import Lion
from castor.runtime.blocks import find_blocks
from castor.runtime.engine import engine_of
from grids import some
from helpers import GIB, Boosted
from pipeline_cases import MICROBATCHES, ZERO_BUBBLE, batch, in_parts
from tensor_cases import (
    EXPERTS,
    FAMILIES,
    MAX_NORM,
    RING,
    STEPS,
    accumulated,
    decoder,
    half_of,
    of_all,
    padded,
    said,
    write,
    write_own,
)
from zoo import Batch, Case, gpt2, llama

Optimizers = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Way:
    """A way to divide a model among ranks."""

    case: Case
    sizes: dict[str, Any]
    ranks: int = 2
    own_data: bool = False
    """Whether ranks have batches of their own, all of which one process accumulates."""
    micro: bool = field(init=False)
    """Whether batches are divided, and go to execute_pipeline."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro", "num_microbatches" in self.sizes)

    @property
    def sharing(self) -> int:
        """Ranks that compute each block together: neighbours."""
        sizes = [self.sizes.get(name, 1) for name in ("tp_size", "ep_size", "sp_size")]
        return math.prod(sizes)

    def batches(self, step: int) -> list[Batch]:
        """Of all ranks in a step, as one process accumulates them."""
        if self.micro:
            whole = batch(self.case, step)
            return in_parts(whole)
        of = self.ranks if self.own_data else 1
        return [self.case.batch(step * of + who) for who in range(of)]

    def boost(
        self, optimizer: Optimizers, *, lazy: bool = False, whole: bool = False, **settings: Any
    ) -> Boosted:
        """The model, divided, unless it is to be whole in one process."""
        if lazy:
            with castor.LazyInitContext():
                model = self.case.model()
        else:
            model = self.case.model()
        made = optimizer(model.parameters())
        given = {
            "device": "cpu", "device_memory": GIB, "host_memory": GIB, "precision": "fp32",
            "max_norm": MAX_NORM, "activations": "keep",
        } | settings  # fmt: skip
        sizes = {} if whole else self.sizes
        booster = castor.Booster(plugin=castor.HybridParallelPlugin(**sizes, **given))
        booster.boost(model, made)
        return Boosted(booster, model, made)

    def train(self, boosted: Boosted, first: int = 0, steps: int = STEPS) -> list[float]:
        """Losses, the mean over the ranks where these have their own data."""
        losses = []
        for step in range(first, first + steps):
            if self.micro:
                data = iter([batch(self.case, step)])
                done = boosted.booster.execute_pipeline(
                    data, boosted.model, None, boosted.optimizer
                )
                boosted.optimizer.step()
                boosted.optimizer.zero_grad()
                losses.append(done["loss"].item())
            else:
                who = distributed.get_rank() if self.own_data else 0
                given = self.batches(step)[who]
                losses.append(boosted.step(self.case.loss(boosted.model(**given), given)))
        everyone = of_all(losses)
        if self.own_data:
            return torch.tensor(everyone, dtype=torch.float64).mean(0).tolist()
        assert everyone == [losses] * len(everyone)
        return losses


def plain(way: Way, optimizer: Optimizers, steps: int = STEPS) -> list[float]:
    """Losses of plain PyTorch in one process: of several ranks the first has them."""
    if distributed.is_initialized() and distributed.get_rank() > 0:
        return []
    model = way.case.model()
    steps_of_all = (way.batches(step) for step in range(steps))
    return accumulated(model, optimizer(model.parameters()), steps_of_all, way.case.loss)


SPLIT_GATHER = {"sequence_parallelism_mode": "split_gather"}
STAGES: dict[str, Any] = {"pp_size": 2, "num_microbatches": MICROBATCHES}
INTERLEAVED = {"pp_style": "interleaved", "num_model_chunks": 2}
DEEP = Case("llama4", lambda: llama(layers=4), FAMILIES["llama"].batch)
WAYS = {
    "layers": Way(FAMILIES["llama"], {"tp_size": 2}),
    "tied": Way(FAMILIES["gpt2"], {"tp_size": 2}),
    "tokens": Way(FAMILIES["llama"], {"tp_size": 2} | SPLIT_GATHER),
    "experts": Way(EXPERTS["mixtral"], {"ep_size": 2}, own_data=True),
    "sequences": Way(FAMILIES["llama"], {"sp_size": 2}),
    "ring": Way(FAMILIES["llama"], {"sp_size": 2} | RING),
    "stages": Way(FAMILIES["gpt2"], STAGES),
    "interleaved": Way(DEEP, STAGES | INTERLEAVED),
    "layers, stages": Way(DEEP, STAGES | INTERLEAVED | {"tp_size": 2}, ranks=4),
    "layers, sequences": Way(FAMILIES["llama"], {"tp_size": 2, "sp_size": 2}, ranks=4),
    "sequences, stages": Way(DEEP, STAGES | {"sp_size": 2}, ranks=4),
}  # fmt: skip


def of_ranks(ways: dict[str, Way]) -> dict[str, Way]:
    """Those for as many ranks as there are."""
    return {name: way for name, way in ways.items() if way.ranks == distributed.get_world_size()}


def adam(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def _groups(params: Iterator[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    every = [*params]
    return [
        {"params": [param for param in every if param.ndim > 1], "weight_decay": 0.05},
        {"params": [param for param in every if param.ndim < 2], "weight_decay": 0.0},
    ]


RULES: dict[str, Optimizers] = some({
    "sgd": lambda params: torch.optim.SGD(_groups(params), lr=0.1),
    "momentum": lambda params: torch.optim.SGD(
        _groups(params), lr=0.05, momentum=0.9, dampening=0.1
    ),
    "nesterov": lambda params: torch.optim.SGD(
        _groups(params), lr=0.05, momentum=0.9, nesterov=True
    ),
    "lion": lambda params: Lion(_groups(params), lr=1e-4),
}, "momentum", "lion")  # fmt: skip
RULED = some(
    {name: way for name, way in WAYS.items()
     if name not in ("ring", "tokens", "sequences, stages")},
    "tied", "experts", "interleaved",
)  # fmt: skip
"""Ways in which they are tried."""
AUTO = some(WAYS, "layers", "interleaved")
"""Ways in which ranks decide what becomes of activations."""
BUDGETS = some(
    ("ample", "tight", "least", "nvme", "lazy", "ample by default", "tight by default"),
    "least", "nvme", "lazy", "ample by default",
)  # fmt: skip
"""And with which settings."""
APART = some(("layers", "experts", "ring"), "experts", "ring")
"""Ways in which one rank has less room than the others."""


def in_little(boosted: Boosted, scratch: Path, *in_ci: str) -> dict[str, dict[str, Any]]:
    """Settings with half of the room for a rank's parameters, which change nothing.

    `in_ci`: Those that CI has; on "nvme" the device is tight, too.
    """
    settings = pipeline_cases.in_little(boosted, scratch)
    del settings["offload"]
    return some(settings, *in_ci)  # type: ignore[no-any-return]


def rules(directory: Path) -> None:
    """Losses of SGD and Lion in every division, and what they save."""
    found: dict[str, Any] = {}
    for name, way in of_ranks(RULED).items():
        for rule, make in RULES.items():
            boosted = way.boost(make)
            losses = way.train(boosted)
            found[f"{name}: {rule}"] = [losses, plain(way, make)]
            if rule in ("sgd", "nesterov"):
                continue
            run = directory / f"{name}-{rule}"
            boosted.booster.save(run, boosted.model, boosted.optimizer)
            later = way.train(boosted, STEPS, 2)
            little = in_little(boosted, directory / name, "nvme")
            settings = little if rule == "lion" else {"ample": {}}
            for setting, given in settings.items():
                again = way.boost(make, **given)
                assert way.train(again) == losses, (name, rule, setting)
                if "device_memory" in given:
                    assert again.report().peak_device_bytes <= given["device_memory"]
                again.booster.load(run, again.model, again.optimizer)
                assert way.train(again, STEPS, 2) == later, (name, rule, setting)
    write(directory, "rules", found)


def rules_loaded(directory: Path) -> None:
    """Goes on with what one process has written, and writes it again."""
    found: dict[str, Any] = {}
    for name, way in of_ranks(RULED).items():
        for rule in ("momentum", "lion"):
            boosted = way.boost(RULES[rule])
            boosted.booster.load(directory / f"one-{name}-{rule}", boosted.model, boosted.optimizer)
            boosted.booster.save(
                directory / f"again-{name}-{rule}", boosted.model, boosted.optimizer
            )
            found[f"{name}: {rule}"] = way.train(boosted, STEPS, 2)
    write(directory, "rules_loaded", found)


def figures(boosted: Boosted) -> list[int]:
    """How many blocks a rank has, recomputes and offloads."""
    report = boosted.report()
    return [report.activation_blocks, report.recomputed_blocks, report.offloaded_blocks]


def _with_memory_at_hand() -> None:
    """From now on fresh memory takes no time: how much a busy machine needs for it is chance."""
    auto_activations._fault_seconds = lambda: 0.0


def auto(directory: Path) -> None:
    """Losses with activations="auto" in every division and several budgets; what ranks decide."""
    _with_memory_at_hand()
    found: dict[str, Any] = {}
    for name, way in of_ranks(AUTO).items():
        kept = way.boost(adam)
        losses = way.train(kept)
        least = way.boost(adam, activations="recompute")
        assert way.train(least) == losses
        budgets: dict[str, dict[str, Any]] = {
            "ample": {},
            **in_little(kept, directory / name, "tight", "nvme"),
            "least": {"device_memory": half_of(least)},
            "lazy": {"lazy": True, "overlap": "forward"},
        }
        found[name] = [losses, plain(way, adam)]
        for setting, given in budgets.items():
            if setting not in BUDGETS:
                continue
            boosted = way.boost(adam, activations="auto", **given)
            assert way.train(boosted) == losses, (name, setting)
            if "device_memory" in given:
                assert boosted.report().peak_device_bytes <= given["device_memory"], (name, setting)
            found[f"{name}, {setting}"] = of_all(figures(boosted))
        for setting in ("ample", "tight"):  # where nobody asks for anything else
            if f"{setting} by default" not in BUDGETS:
                continue
            boosted = way.boost(adam, activations=None, **budgets[setting])
            if not way.micro:
                _fail_in_a_block(boosted, way)
            assert way.train(boosted) == losses, (name, setting)
            found[f"{name}, {setting} by default"] = of_all(figures(boosted))
    write(directory, "auto", found)


def _fail_in_a_block(boosted: Boosted, way: Way) -> None:
    """A forward raises on every rank, in the midst of the profile of the first step."""
    *_, last = find_blocks(boosted.model).values()

    def fail(*_: Any) -> None:
        raise KeyError("the last block")

    parts = [module for module in last.modules() if module is not last]
    handle = parts[0].register_forward_hook(fail)
    for _ in range(3):
        heard = said(lambda: boosted.model(**way.batches(0)[0]))
        assert heard.startswith("KeyError"), heard
    handle.remove()


def _without_offload() -> None:
    """From now on what is not kept is recomputed: what copies take is another thing on each run."""
    search = auto_activations.search

    def searched(choice: Callable[[Decisions], Choice], blocks: int, most: int) -> Choice:
        def found(decisions: Decisions) -> Choice:
            taken = choice(decisions)
            return replace(taken, spare_bytes=-1) if "offload" in decisions else taken

        return search(found, blocks, most)

    auto_activations.search = searched


def auto_apart(directory: Path) -> None:
    """What ranks decide that would decide differently, each by itself."""
    rank, found = distributed.get_rank(), {}
    _with_memory_at_hand()
    _without_offload()
    for name in APART:
        way = WAYS[name]
        kept = way.boost(adam)
        losses = way.train(kept, 0, 7)
        least = way.boost(adam, activations="recompute")
        way.train(least, 0, 2)
        own = sum(param.nbytes for param in kept.model.parameters())
        small = int(least.report().peak_nonmodel_bytes + 0.3 * own)
        boosted = way.boost(adam, activations="auto", device_memory=small if rank else GIB)
        assert way.train(boosted, 0, 7) == losses
        found[f"{name}, budgets"] = of_all(figures(boosted))
        # One rank holds more than it did when blocks were chosen.
        boosted = way.boost(adam, activations="auto", device_memory="64MiB")
        assert way.train(boosted, 0, 4) == losses[:4]
        found[f"{name}, before"] = of_all(figures(boosted))
        left_plan = boosted.report().divergent_steps
        policy: Any = engine_of(boosted.model).blocks
        more, held = policy._auto._spare + 8192 if rank else 0, []
        hook = boosted.model.get_input_embeddings().register_forward_hook(  # type: ignore[operator]
            lambda *_, more=more, held=held: held.append(torch.zeros(more, dtype=torch.uint8))
        )
        assert way.train(boosted, 4, 1) == losses[4:5]
        hook.remove()
        held.clear()
        found[f"{name}, held"] = of_all(boosted.report().divergent_steps - left_plan)
        assert way.train(boosted, 5, 2) == losses[5:7]
        # Larger batches, for one rank alone where they have their own.
        larger = dict(way.batches(7)[rank if way.own_data else 0])
        if rank or not way.own_data:
            larger = {key: torch.cat([value, value]) for key, value in larger.items()}
        states = []
        for _ in range(3):
            boosted.step(boosted.model(**larger).loss)
            states.append(figures(boosted))
        found[f"{name}, larger"] = of_all(states)
    write(directory, "auto_apart", found)


def auto_copies(directory: Path) -> None:
    """Two copies of a model on four ranks, of which the second has little room."""
    _with_memory_at_hand()
    _without_offload()
    rank, found = distributed.get_rank(), {}
    ways = some({"layers": {"tp_size": 2}, "sequences": {"sp_size": 2}}, "layers")
    for name, sizes in ways.items():
        rows = Case("rows", FAMILIES["llama"].build, lambda seed: _rows(seed, rank // 2))
        way = Way(rows, sizes)

        def losses_of(boosted: Boosted, case: Case = rows) -> list[float]:
            return [boosted.step(boosted.model(**case.batch(seed)).loss) for seed in range(STEPS)]

        kept, least = way.boost(adam), way.boost(adam, activations="recompute")
        losses = losses_of(kept)
        assert losses_of(least) == losses
        own = sum(param.nbytes for param in kept.model.parameters())
        small = int(least.report().peak_nonmodel_bytes + 0.3 * own)
        boosted = way.boost(adam, activations="auto", device_memory=small if rank > 1 else GIB)
        assert losses_of(boosted) == losses
        found[name] = of_all(figures(boosted))
    write(directory, "auto_copies", found)


def _rows(seed: int, share: int) -> Batch:
    """A half of a batch."""
    return {name: value[share::2] for name, value in FAMILIES["llama"].batch(seed).items()}


def auto_fails(directory: Path) -> None:
    """On rank 1 an allocation fails within a block that is kept; it ends, and rank 0 hears it."""
    _with_memory_at_hand()
    _without_offload()
    way, budget = WAYS["layers"], 64 << 20
    boosted = way.boost(adam, activations="auto", device_memory=budget)
    way.train(boosted, 0, 2)
    assert figures(boosted) == [2, 0, 0]
    if distributed.get_rank() == 1:
        model: Any = boosted.model
        model.model.layers[1].mlp.register_forward_hook(lambda *_: torch.zeros(budget))
    given = way.batches(2)[0]
    heard = said(lambda: boosted.step(boosted.model(**given).loss))
    write_own(directory, "auto_fails", heard)
    sys.stdout.flush()
    os._exit(0)  # there is nobody to meet at the end


def come_and_go(directory: Path) -> None:
    """How many threads there are after each of three models, one after the other."""
    plugins: dict[str, Callable[[], Any]] = {
        "copies": lambda: castor.GeminiPlugin(device="cpu", device_memory=GIB, host_memory=GIB),
        "torch's copies": castor.TorchDDPPlugin,
        "torch's parts": castor.TorchFSDPPlugin,
    }
    found: dict[str, list[int]] = {}
    for name, way in of_ranks(WAYS).items():
        for _ in range(3):
            boosted = way.boost(adam)
            way.train(boosted, 0, 1)
            del boosted
            found.setdefault(name, []).append(_threads())
    for name, make in plugins.items():
        for _ in range(3):
            model = FAMILIES["llama"].model()
            booster = castor.Booster(plugin=make())
            optimizer = adam(model.parameters())
            booster.boost(model, optimizer)
            booster.backward(model(**FAMILIES["llama"].batch(0)).loss, optimizer)
            optimizer.step()
            del model, booster, optimizer
            found.setdefault(name, []).append(_threads())
    write(directory, "come_and_go", found)


def _threads() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))


WIDE = decoder("wide", hf.LlamaConfig, hidden_size=512, intermediate_size=1024)
IN_BLOCKS = some({
    "layers": Way(WIDE, {"tp_size": 2}),
    "packed": Way(
        Case("wide gpt2", lambda: gpt2(width=512, layers=1), FAMILIES["gpt2"].batch), {"tp_size": 2}
    ),
    "experts": Way(EXPERTS["mixtral"], {"ep_size": 2}, own_data=True),
    "sequences": WAYS["sequences"],
    "layers, stages": Way(WIDE, STAGES | {"tp_size": 2}, ranks=4),
}, "packed", "experts")  # fmt: skip
"""Of which every rank has whole blocks of 256 moments."""
INT8: dict[str, Any] = {"precision": "bf16", "optim_state_format": "split_int8", "seed": 3}


def int8(directory: Path) -> None:
    """Losses with moments of 8 bits in parts, and what is saved of them."""
    found: dict[str, Any] = {}
    for name, way in IN_BLOCKS.items():
        if way.ranks != distributed.get_world_size():
            continue
        boosted = way.boost(adam, **INT8)
        losses = way.train(boosted)
        found[name] = [losses, plain(way, adam)]
        run = directory / name
        boosted.booster.save(run, boosted.model, boosted.optimizer)
        later = way.train(boosted, STEPS, 2)
        little = in_little(boosted, directory / f"{name}-nvme", "nvme")
        for setting, given in little.items():
            again = way.boost(adam, **INT8, **given)
            assert way.train(again) == losses, (name, setting)
            again.booster.load(run, again.model, again.optimizer)
            assert way.train(again, STEPS, 2) == later, (name, setting)
    case = decoder("narrow", hf.LlamaConfig)
    found["narrow"] = of_all(said(lambda: Way(case, {"tp_size": 2}).boost(adam, **INT8)))
    write(directory, "int8", found)


def _tiled(name: str, **sizes: Any) -> Way:
    case = FAMILIES[name]
    given = Case(name, case.build, lambda seed: padded(case, seed))
    ranks = math.prod(sizes.get(size, 1) for size in ("tp_size", "sp_size", "pp_size")) * 2
    return Way(given, {"tp_size": 2, "parallel_output": True} | sizes, ranks=ranks)


TILED = some({
    "llama": _tiled("llama"),
    "gpt2": _tiled("gpt2"),
    "gemma2": _tiled("gemma2"),
    "mixtral": _tiled("mixtral"),
    "tokens": _tiled("llama", **SPLIT_GATHER),
    "sequences": _tiled("gpt2", sp_size=2),
    "stages": _tiled("llama", **STAGES),
    "zbv": replace(_tiled("llama", **STAGES, **ZERO_BUBBLE), case=DEEP),
}, "llama", "sequences", "zbv")  # fmt: skip
"""Losses of parts of the vocabulary in tiles of rows."""


def tiles(directory: Path) -> None:
    """Losses over logits of which a rank has some columns, for some rows at a time."""
    found: dict[str, Any] = {}
    for name, way in TILED.items():
        if way.ranks != distributed.get_world_size():
            continue
        boosted = way.boost(adam, tile_logits=7)
        losses = way.train(boosted)
        found[name] = [losses, plain(way, adam)]
        found[f"{name}, tiles"] = of_all(boosted.report().logit_tiles)
        for setting, given in in_little(boosted, directory / name, "nvme").items():
            again = way.boost(adam, tile_logits=7, **given)
            assert way.train(again) == losses, (name, setting)
            if "device_memory" in given:
                assert again.report().peak_device_bytes <= given["device_memory"]
        found[f"{name}, one tile"] = [
            way.train(way.boost(adam, tile_logits=1000), 0, 3),
            way.train(way.boost(adam, tile_logits=False), 0, 3),
        ]
    if distributed.get_world_size() == 2:
        way = TILED["llama"]
        halves = [
            way.train(way.boost(adam, precision="bf16", tile_logits=tiled), 0, 3)
            for tiled in (7, False)
        ]
        found["bf16"] = halves
        wide = decoder("words", hf.LlamaConfig, vocab_size=8192)
        long = Case("words", wide.build, lambda seed: batch(FAMILIES["llama"], seed))
        way = Way(long, way.sizes)
        for tiled in (8, False):
            boosted = way.boost(adam, tile_logits=tiled)
            way.train(boosted, 0, 2)
            found[f"peak {tiled}"] = boosted.report().peak_nonmodel_bytes
    write(directory, "tiles", found)


if __name__ == "__main__":
    as_rank.run(globals())
