"""Finds the least memory of a boosted model's step, on a copy without values."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from castor import _C
from castor.activations.tight import MOST_TILES, Pieces, Shape
from castor.config import TileLogits
from castor.estimate.activations import Logits, RecomputedBlocks
from castor.estimate.estimator import named_in_block
from castor.estimate.metatrace import Step, record_step
from castor.estimate.model import SHORTEST_SEQUENCE, make_inputs
from castor.estimate.search import largest
from castor.runtime.spec import ModelSpec

_GRAINS = 64
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_MARGIN = 1.05
"""Factor by which promised memory is above the simulated one."""


@dataclass(frozen=True)
class Need:
    """The memory of a step in which every block is recomputed."""

    total_bytes: int
    """Device bytes, at least."""
    module: str
    """Module that needs them."""
    nonmodel_bytes: int
    """Activations and temporaries, at most."""


class SimulatedSteps:
    """Steps of one boosted model on the meta device, all blocks recomputed; see activations.tight.

    A model that cannot run without values, and one that takes no tokens, has none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        simulator: _C.Simulator,
        options: dict[str, Any],
        gather_embeddings: bool,
        tile_logits: TileLogits,
        device: str,
    ) -> None:
        """Takes a model, which is traced at the first question.

        Args:
            model: Boosted.
            simulator: Laid out as its session is.
            options: What Simulator.run is told.
            gather_embeddings: The plugin's.
            tile_logits: The plugin's.
            device: The type of that where it computes.
        """
        self._original = weakref.ref(model)
        self._simulator = simulator
        self._options = options
        self._gather_embeddings = gather_embeddings
        self._tile_logits = tile_logits
        self._device = device
        self._copy: _Copy | None = None
        self._steps: dict[tuple[Shape, int, bool], Step] = {}

    def fitting(self, shape: Shape) -> Pieces | None:
        """The fewest pieces of logits, then of MLPs, in which a step fits the budget."""
        with _undisturbed():
            try:
                for pieces in self._ladder(shape):
                    if pieces.tiles == 2 and self._fits_without_output(shape):
                        return Pieces()
                    need = self._need(shape, pieces).total_bytes
                    if need * (_MARGIN if pieces != Pieces() else 1.0) <= self._budget:
                        return pieces
                return pieces if need <= self._budget else None
            except Exception:  # whatever a model may do where tensors have no values
                return None

    def _fits_without_output(self, shape: Shape) -> bool:
        """Whether no piece is needed if the loop drops the forward's outputs before backward."""
        need = self._need(shape, Pieces(), keeps_output=False)
        return need.total_bytes <= self._budget

    def advice(self, shape: Shape) -> str:
        """Describes the memory of a step, and the largest step that fits; "": not known."""
        with _undisturbed():
            try:
                return self._advice(shape)
            except Exception:  # as above: the error that is being told of has its own numbers
                return ""

    @property
    def _budget(self) -> int:
        return int(self._options["device_bytes"])

    def _advice(self, shape: Shape) -> str:
        need = self._least(shape)
        at_least = self._promised(shape)
        samples, tokens = shape
        where = named_in_block(self._model.model, need.module)
        pieces = ", its logits and MLPs in tiles" if self._can_be_cut else ""
        said = (
            f". A step of {samples} x {tokens} tokens, every block recomputed{pieces}, takes at "
            f"least {_size(at_least)}, of which activations and temporaries are "
            f"{_size(need.nonmodel_bytes)}: {where} does. "
        )
        if at_least <= self._budget:
            return said + (
                "The budget has room for that, so there is something that a step of the model "
                "alone does not have: drop outputs and losses of earlier steps, or raise "
                "device_memory"
            )
        longest = self._largest(lambda n: (samples, n), tokens, SHORTEST_SEQUENCE)
        batch = self._largest(lambda n: (n, tokens), samples, 1) if samples > 1 else 0
        fits = [f"{samples} x {longest} tokens"] if longest else []
        fits += [f"{batch} x {tokens} tokens"] if batch else []
        smaller = (
            f", or make it smaller: {' or '.join(fits)} would do"
            if fits
            else (": no batch of this model is small enough for the budget")
        )
        return f"{said}Raise device_memory to that or more{smaller}"

    def _largest(self, shape: Callable[[int], Shape], start: int, least: int) -> int:
        """The largest number below `start` that fits, to a part in _GRAINS; 0: none does."""
        unit = max(1, start // _GRAINS)  # each that is tried is a step to record
        fixed = self._least(shape(least))
        found = largest(
            lambda number: self._promised(shape(number * unit)),
            self._budget,
            fixed=fixed.total_bytes - fixed.nonmodel_bytes,
            start=max(1, start // unit // 2),
            least=-(-least // unit),
            most=start // unit,
        )
        return found * unit

    @property
    def _model(self) -> _Copy:
        if self._copy is None:
            model = self._original()
            assert model is not None
            self._copy = _Copy(model, gather_embeddings=self._gather_embeddings)
        return self._copy

    @property
    def _can_be_cut(self) -> bool:
        return bool(self._model.blocks.tiled) or self._tile_logits == "auto"

    def _ladder(self, shape: Shape) -> list[Pieces]:
        """From none to the most, each of less memory than the one before it."""
        rows = shape[0] * shape[1]
        cuts = [2**i for i in range(1, MOST_TILES.bit_length()) if 2**i <= rows]
        found = [Pieces()]
        if self._tile_logits == "auto" and self._model.logits.found:
            found += [Pieces(logit_rows=-(-rows // cut)) for cut in cuts]
        if self._model.blocks.tiled:
            smallest = found[-1].logit_rows
            found += [Pieces(tiles=cut, logit_rows=smallest) for cut in cuts]
        return found

    def _least(self, shape: Shape) -> Need:
        return self._need(shape, self._ladder(shape)[-1])

    def _promised(self, shape: Shape) -> int:
        return math.ceil(_MARGIN * self._least(shape).total_bytes)

    def _need(self, shape: Shape, pieces: Pieces, *, keeps_output: bool = True) -> Need:
        # A loop may have the outputs until backward is over; logits in pieces have no values there.
        may_cut = self._tile_logits == "auto" and self._model.logits.found
        keeps_output &= may_cut and not pieces.logit_rows
        step, model = self._step(shape, pieces.tiles, keeps_output=keeps_output), self._model
        rows = step.rows
        tile = model.logits.rows_per_tile(rows, self._budget, self._tile_logits)
        if pieces.logit_rows and not 0 < tile <= pieces.logit_rows:
            tile = pieces.logit_rows
        moments = model.logits.tiled(step.moments, rows, tile) if 0 < tile < rows else step.moments
        events = [(m.kind, m.position, m.nonmodel_bytes, 0) for m in moments]
        found = self._simulator.run(events, [0.0] * len(events), self._options)
        # Random states of each block and of its pieces, and the copy of an output that a first step
        # compares.
        pieces_of_a_block = pieces.tiles if pieces.tiles > 1 else 0
        more = model.blocks.num_blocks * (1 + pieces_of_a_block) * torch.get_rng_state().nbytes
        more += max((run.input_bytes for run in step.runs), default=0)
        return Need(
            found["smallest_budget_bytes"] + more,
            found["smallest_budget_module"],
            max(event[2] for event in events) + more,
        )

    def _step(self, shape: Shape, tiles: int, *, keeps_output: bool) -> Step:
        key = (shape, tiles, keeps_output)
        if key not in self._steps:
            model = self._model
            inputs = make_inputs(model.model, batch=shape[0], sequence=shape[1])
            with model.blocks.tiles.at(tiles):
                self._steps[key] = record_step(
                    *(model.model, model.spec, inputs, self._simulator, model.blocks),
                    device=self._device,
                    keeps_output=keeps_output,
                )
        return self._steps[key]


class _Copy:
    """A boosted model without castor and without values.

    Each module has its class's forward: one that somebody has put in its place (accelerate's casts,
    TRL's heads) may hold the original, whose hooks would see a step that nobody runs.
    """

    def __init__(self, boosted: nn.Module, *, gather_embeddings: bool) -> None:
        memo: dict[int, Any] = {id(buffer): _bare(buffer) for buffer in boosted.buffers()}
        for param in boosted.parameters():
            memo[id(param)] = nn.Parameter(_bare(param), requires_grad=param.requires_grad)
        self.model = copy.deepcopy(boosted, memo)
        for module in self.model.modules():
            module.__dict__.pop("forward", None)
            for registry in _HOOKS:  # others' would see what nobody runs
                getattr(module, registry).clear()
        if hasattr(getattr(self.model, "config", None), "use_cache"):
            self.model.config.use_cache = False  # type: ignore[union-attr]
        self.spec = ModelSpec.structure(self.model, gather_embeddings=gather_embeddings)
        self.logits = Logits(self.model, self.spec)
        self.blocks = RecomputedBlocks(self.model)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _size(num_bytes: int) -> str:
    """Rounded up: a budget of that much holds so many."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{math.ceil(100 * num_bytes / unit) / 100:.2f} {name}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """In it a step may be recorded, whatever the caller is about; his random numbers stay."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        yield
