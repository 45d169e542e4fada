"""Finds the blocks of a model and decides which of them keep their activations."""

from __future__ import annotations

import fnmatch
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from castor import _C
from castor.activations.auto import AutoKeep
from castor.activations.caches import refuse_filled_caches
from castor.activations.choices import BlockRanks, Sharing
from castor.activations.gate import Gate
from castor.activations.offload import OffloadingCall
from castor.activations.recompute import Recomputation, RecomputingCall, routes
from castor.activations.tight import StepSimulator, Tight
from castor.activations.tiles import TiledForward, is_tiled, tile_mlps, tiled_submodules
from castor.config import Activations, BlockChoice, GeminiConfig
from castor.errors import OutOfMemoryError, UsageError
from castor.runtime.blocks import BlockPolicy, compiled_submodules, find_blocks, has_switch
from castor.runtime.boosted_model import compiled_from
from castor.runtime.engine import Engine
from castor.runtime.hooks import (
    Around,
    ForwardAround,
    ModuleHook,
    Replaced,
    compiled_calls,
    has_own_forward,
)
from castor.runtime.report import BlockFigures

_NAMED = 4
"""Number of blocks that an error names, of many."""


@dataclass(frozen=True)
class Decision:
    """Decision on a module's activations."""

    name: str
    """Name of the module in the model."""
    module: nn.Module
    """The module."""
    choice: str
    """"keep", "recompute", "offload" or "tile"."""
    tiles: int = 0
    """Number of pieces of rows that the forward runs on, with "tile"."""

    @property
    def recompute(self) -> bool:
        """Whether backward runs the module's forward again."""
        return self.choice == "recompute"


class Blocks(BlockPolicy):
    """Blocks of one model, with the decision on each. Holds no module after apply()."""

    def __init__(self, model: nn.Module, config: GeminiConfig) -> None:
        """Decides on the blocks. The model is not changed before apply().

        Args:
            model: The model, not boosted yet.
            config: The plugin's configuration.

        Raises:
            UsageError: The model has no blocks that the configuration asks for, or a decision
                cannot be applied to a block.
        """
        blocks = find_blocks(model)
        self._config = config
        self._blocks = {name: weakref.ref(module) for name, module in blocks.items()}
        self._by_default = config.activations_by_default
        self._decisions = _decide(blocks, config.activations)
        compiled = compiled_submodules(model)
        if self._by_default:
            self._decisions = [d for d in self._decisions if not _is_within(compiled, d.module)]
        _check_compiled(self._decisions, compiled, config.activations)
        self._recomputed = 0
        self._offloaded = 0
        self._tiled = 0
        self._auto: AutoKeep | None = None
        self._offload: _C.ActivationOffload | None = None
        self._moved_before = self._moved_in_step = 0
        self._replaced = Replaced()
        self._tight: Tight | None = None
        self._cut: list[weakref.ref[nn.Module]] = []  # MLPs that "auto" runs in pieces
        self._gates: list[Gate] = []
        self._ample = False  # whether the model's current forward has ample room
        self._was_short = False
        self._block_ranks = BlockRanks()
        if self._decisions and self._with_switch_on() and not self._by_default:
            chosen = sum(decision.recompute for decision in self._decisions)
            counted = "as many as serve" if config.activations == "auto" else str(chosen)
            warnings.warn(
                f"the model's gradient checkpointing gives way to activations: {counted} of "
                f"{len(self._blocks)} blocks are recomputed. Pass activations='keep' for its own",
                stacklevel=4,  # past configure and boost
            )

    def apply(
        self,
        model: nn.Module,
        engine: Engine,
        simulated: Callable[..., StepSimulator] | None = None,
        sharing: Sequence[Sharing] = (),
    ) -> None:
        """Applies the decisions to training forwards from now on. Called once, on a boosted model.

        Args:
            model: The boosted model.
            engine: The model's engine.
            simulated: Makes simulated steps (castor.estimate.boosted.SimulatedSteps), which find
                the pieces that fit a small budget; None: there is no such search.
            sharing: Groups of ranks that compute each block together with this one; "auto" makes
                the same decisions on all of them.
        """
        engine.blocks = self
        own = set(model.modules())  # other blocks may be on other ranks
        self._decisions = [decision for decision in self._decisions if decision.module in own]
        self._blocks = {name: ref for name, ref in self._blocks.items() if ref() in own}
        if self._decisions:
            self._offload = _C.ActivationOffload(engine.session)
        if self._offload and self._config.activations == "auto":
            num_blocks = len(self._decisions)
            self._block_ranks = BlockRanks(sharing)
            self._auto = AutoKeep(
                *(model, engine, self._config, num_blocks, self._offload, self._block_ranks)
            )
            self._replaced = engine.replaced
            if simulated:
                self._look_at(model, simulated, engine.device.type)
        classes: set[tuple[str, type]] = set()
        put = engine.replaced.put
        compiled = compiled_calls(model)
        for block, decision in enumerate(self._decisions):
            module = decision.module
            compared = (decision.choice, type(module)) not in classes
            classes.add((decision.choice, type(module)))
            by_switch = has_switch(module) and module not in compiled
            if self._by_default:
                self._gates.append(self._gate(decision, block, compared=compared))
                continue
            if has_switch(module) and decision.choice != "tile":
                put(module, "gradient_checkpointing", decision.recompute and by_switch)
            if decision.choice == "tile":
                tiled = TiledForward(module, decision.name, tiles=decision.tiles, compared=compared)
                put(module, "forward", tiled)
            elif decision.recompute and by_switch:
                refuse_filled_caches(module, decision.name)
                recomputation = Recomputation(
                    *(module, decision.name),
                    compared=compared,
                    auto=self._auto,
                    block=block,
                    lenient=self._auto is not None,
                )
                put(module, "_gradient_checkpointing_func", recomputation)
            elif around := self._around(decision, compared=compared):
                if module in compiled:
                    compiled[module].around = around
                else:
                    put(module, "forward", ForwardAround(module, around))
        self._tiled = sum(any(map(is_tiled, block.modules())) for block in self._alive())
        self._decisions = []

    def _gate(self, decision: Decision, block: int, *, compared: bool) -> Gate:
        own = weakref.ref(self)
        recomputation = Recomputation(
            *(decision.module, decision.name),
            compared=compared,
            auto=self._auto,
            block=block,
            lenient=True,
        )

        def wanted() -> bool:
            blocks = own()
            return blocks is not None and not blocks._ample

        return Gate(decision.module, decision.name, recomputation, wanted, self._block_ranks)

    def _look_at(
        self, model: nn.Module, simulated: Callable[..., StepSimulator], device: str
    ) -> None:
        assert self._auto is not None
        config = self._config
        simulator, options = self._auto.simulated_steps()
        steps = simulated(
            model,
            simulator=simulator,
            options=options,
            gather_embeddings=config.gather_embeddings,
            tile_logits=config.tile_logits,
            device=device,
        )
        self._tight = Tight(model, steps, options["device_bytes"])
        own = weakref.ref(self)
        model.register_forward_pre_hook(ModuleHook(_comes, own), with_kwargs=True, prepend=True)
        model.register_forward_hook(ModuleHook(_ends, own), always_call=True)

    def comes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Prepares a training forward of the model: looks whether its size fits the budget."""
        if not (self._tight and self._auto):
            return
        if self._by_default and self._block_ranks.alone and not self._was_short:
            self._ample = self._tight.is_ample(args, kwargs, self._auto.nonmodel_bytes)
        if self._ample or not self._tight.comes(args, kwargs):
            return
        pieces = self._tight.pieces
        self.logit_rows = pieces.logit_rows
        if pieces.tiles > 1 == self._auto.tiles.number:
            alive = {n: block for n, ref in self._blocks.items() if (block := ref()) is not None}
            tiled = tile_mlps(alive, self._auto.tiles, self._replaced.put)
            self._cut = [weakref.ref(module) for module in tiled]
        self._auto.cut(pieces.tiles)

    def explain(self, error: BaseException | None) -> None:
        """Ends a forward of the model, and explains its error; see BlockPolicy."""
        self._ample = False
        self._was_short |= isinstance(error, OutOfMemoryError)
        if self._tight:
            self._tight.explain(error)

    def _around(self, decision: Decision, *, compared: bool) -> Around | None:
        """Returns the wrapper of the module's forward; None: it runs as it is."""
        if decision.recompute:
            self._recomputed += 1
            return RecomputingCall(decision.module, decision.name, compared=compared)
        if decision.choice == "offload" and self._offload:
            self._offloaded += 1
            return OffloadingCall(decision.module, self._offload)
        return None

    def figures(self) -> BlockFigures:
        """Returns the current figures: user code may turn a model's own switch at any time."""
        switches = [
            getattr(m, "_gradient_checkpointing_func", None) for m in self._with_switch_on()
        ]
        off = sum(isinstance(s, Recomputation) and not s.recomputes for s in switches)
        chosen = self._auto.offloaded_blocks if self._auto else 0
        by_default = sum(gate.recomputes for gate in self._gates)
        return BlockFigures(
            activation_blocks=len(self._blocks),
            recomputed_blocks=self._recomputed + len(switches) - off + by_default,
            saved_activation_bytes=self._auto.kept_bytes if self._auto else 0,
            recompute_seconds=self._auto.recompute_seconds if self._auto else 0.0,
            offloaded_blocks=self._offloaded + chosen,
            offloaded_activation_bytes=self._moved_in_step,
            tiled_blocks=self._tiled + (len(self._tiled_by_auto()) if self._cut else 0),
            mlp_tiles=self._auto.tiles.number if self._cut and self._auto else 0,
        )

    def step_ended(self) -> None:
        """Ends a step, after which "auto" may decide anew."""
        if self._auto:
            self._auto.step_ended()
        if self._offload:
            moved = self._offload.figures()["bytes_offloaded"]
            self._moved_in_step, self._moved_before = moved - self._moved_before, moved

    def _tiled_by_auto(self) -> list[nn.Module]:
        cut = {module for ref in self._cut if (module := ref()) is not None and is_tiled(module)}
        return [block for block in self._alive() if not cut.isdisjoint(block.modules())]

    def _with_switch_on(self) -> list[nn.Module]:
        return [m for m in self._alive() if getattr(m, "gradient_checkpointing", False) is True]

    def _alive(self) -> list[nn.Module]:
        return [module for ref in self._blocks.values() if (module := ref()) is not None]


def _comes(
    ref: weakref.ref[Blocks], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Runs as a pre-hook of the model."""
    blocks = ref()
    if blocks is not None and model.training and torch.is_grad_enabled():
        blocks.comes(args, kwargs)


def _ends(ref: weakref.ref[Blocks], *_: Any) -> None:
    """Runs as a hook of the model, also after a forward that fails."""
    blocks = ref()
    if blocks is not None:
        blocks.explain(sys.exc_info()[1])


def _decide(blocks: Mapping[str, nn.Module], activations: Activations) -> list[Decision]:
    if activations == "keep":
        return []
    if activations == "auto":
        return [Decision(*item, "recompute") for item in blocks.items() if has_switch(item[1])]
    if not blocks:
        raise UsageError(
            f"activations={activations!r}, but the model has no blocks: no layers that "
            "transformers can checkpoint, and nothing with parts of its own that stands twice in a "
            "ModuleList or Sequential; use activations='keep', and torch.utils.checkpoint within "
            "the model"
        )
    chosen: dict[str, str] = {}
    patterns = {"*": activations} if isinstance(activations, str) else activations
    for pattern, text in patterns.items():
        matched = [name for name in blocks if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise UsageError(
                f"activations has {pattern!r}, which is no block's name; blocks are {_some(blocks)}"
            )
        chosen |= dict.fromkeys(matched, text)  # the last matching pattern counts
    decisions = []
    for name, text in chosen.items():
        choice, block = BlockChoice.parse(text), blocks[name]
        if choice.part and has_switch(block):
            decisions.append(Decision(name, block, "keep"))
        target = Decision(name, block, choice.kind)
        if choice.part:
            part = _part(block, choice.part, name)
            target = Decision(f"{name}.{choice.part}", part, choice.kind)
        new = [target]
        if choice.tiles:
            new += [
                Decision(f"{name}.{part}", module, "tile", choice.tiles)
                for part, module in tiled_submodules(block, name, choice.tiled_submodule).items()
            ]
        for decision in new:
            _check_forward(decision, text)
        if len({decision.module for decision in new}) < len(new):
            raise UsageError(
                f"activations={text!r} asks for two things of '{new[-1].name}'; tiles are "
                f"recomputed, one at a time: choose 'tile:{choice.tiles}'"
            )
        decisions += new
    return decisions


def _check_forward(decision: Decision, text: str) -> None:
    """Raises UsageError if a decision would replace a forward that is not the class's own."""
    kept = decision.choice == "keep" or (decision.recompute and has_switch(decision.module))
    if not kept and has_own_forward(decision.module):
        raise UsageError(
            f"activations={text!r} for '{decision.name}', but a forward has been put in place of "
            "its own, which castor would replace; take it off, or choose 'keep'"
        )


def _check_compiled(
    decisions: list[Decision], compiled: Mapping[str, nn.Module], activations: Activations
) -> None:
    """Raises UsageError if a decision concerns code within a module that torch.compile compiled."""
    parts = {compiled_from(part): name for name, part in compiled.items()}
    within = {module: name for part, name in parts.items() for module in part.modules()}
    for decision in decisions:
        if decision.choice == "keep" or decision.module not in within:
            continue
        name = within[decision.module]
        asked = f"activations={activations!r} for '{decision.name}'"
        if activations == "auto":
            raise UsageError(
                f"{asked}, but '{name}' is compiled, and its second forward cannot be profiled "
                "there; choose 'recompute', 'offload' or 'keep' for compiled blocks"
            )
        if decision.module not in parts or decision.choice == "tile":
            raise UsageError(
                f"{asked} is for what runs within '{name}', which is compiled as a whole; choose "
                "'recompute', 'offload' or 'keep' for compiled blocks"
            )
        if decision.recompute and routes(decision.module):
            raise UsageError(
                f"{asked}, but '{name}' is compiled and chooses experts, which a second forward "
                "could choose otherwise; choose 'offload' or 'keep', or do not compile it"
            )


def _is_within(compiled: Mapping[str, nn.Module], module: nn.Module) -> bool:
    return any(module is part for whole in compiled.values() for part in whole.modules())


def _part(block: nn.Module, part: str, name: str) -> nn.Module:
    try:
        return block.get_submodule(part)
    except AttributeError:
        parts = ", ".join(repr(child) for child, _ in block.named_children())
        raise UsageError(
            f"activations names the part '{part}' of '{name}', a {type(block).__name__} without "
            f"such a part; it has {parts}"
        ) from None


def _some(names: Mapping[str, Any]) -> str:
    listed = [f"'{name}'" for name in names]
    if len(listed) <= _NAMED:
        return ", ".join(listed)
    return f"{', '.join(listed[: _NAMED - 1])}, ... {listed[-1]}"
