"""Finds the least memory of a boosted model's step, on a copy on the meta device."""

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
"""Safety factor on the simulated memory."""


@dataclass(frozen=True)
class Need:
    """Memory of a step in which every block is recomputed."""

    total_bytes: int
    """Least device bytes of the step."""
    module: str
    """Name of the module that needs them."""
    nonmodel_bytes: int
    """Peak bytes of activations and temporaries."""


class SimulatedSteps:
    """Steps of one boosted model on the meta device, all blocks recomputed; see activations.tight.

    For a model that cannot run on the meta device, or takes no tokens, nothing is known.
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
        """Takes a model, which is recorded at the first question.

        Args:
            model: The boosted model; only a weak reference is held.
            simulator: Simulator with the chunks of the model's session.
            options: Options of Simulator.run.
            gather_embeddings: The plugin's gather_embeddings.
            tile_logits: The plugin's tile_logits.
            device: Type of the device that the model runs on.
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
        """Returns the fewest pieces of logits, then of MLPs, with which a step fits; else None."""
        with _undisturbed():
            try:
                for pieces in self._ladder(shape):
                    if pieces.tiles == 2 and self._fits_without_output(shape):
                        return Pieces()
                    need = self._need(shape, pieces).total_bytes
                    if need * (_MARGIN if pieces != Pieces() else 1.0) <= self._budget:
                        return pieces
                return pieces if need <= self._budget else None
            except Exception:  # a model may raise anything on the meta device
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
            except Exception:  # as above; the error that is being explained has its own numbers
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
        """Returns the largest number up to `start` that fits, in steps of 1/_GRAINS; 0: none."""
        unit = max(1, start // _GRAINS)  # each number that is tried costs a recorded step
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
        """Returns the choices of pieces, from none to the most, by falling memory."""
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
        # A training loop may hold the outputs until backward is over; tiled logits have no values.
        may_cut = self._tile_logits == "auto" and self._model.logits.found
        keeps_output &= may_cut and not pieces.logit_rows
        step, model = self._step(shape, pieces.tiles, keeps_output=keeps_output), self._model
        rows = step.rows
        tile = model.logits.rows_per_tile(rows, self._budget, self._tile_logits)
        if pieces.logit_rows and not 0 < tile <= pieces.logit_rows:
            tile = pieces.logit_rows
        trace = model.logits.tiled(step.trace, rows, tile) if 0 < tile < rows else step.trace
        events = [(m.kind, m.position, m.nonmodel_bytes, 0) for m in trace]
        found = self._simulator.run(events, [0.0] * len(events), self._options)
        # Random states of each block and of its pieces, and the copy of an output that the first
        # step compares.
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
    """Copy of a boosted model on the meta device, without castor.

    Each module has its class's forward. A forward that a library has put in its place (accelerate's
    casts, TRL's heads) may hold the original model, whose hooks would then see the simulated step.
    """

    def __init__(self, boosted: nn.Module, *, gather_embeddings: bool) -> None:
        memo: dict[int, Any] = {id(buffer): _bare(buffer) for buffer in boosted.buffers()}
        for param in boosted.parameters():
            memo[id(param)] = nn.Parameter(_bare(param), requires_grad=param.requires_grad)
        self.model = copy.deepcopy(boosted, memo)
        for module in self.model.modules():
            module.__dict__.pop("forward", None)
            for registry in _HOOKS:  # the hooks of others must not see simulated steps
                getattr(module, registry).clear()
        if hasattr(getattr(self.model, "config", None), "use_cache"):
            self.model.config.use_cache = False  # type: ignore[union-attr]
        self.spec = ModelSpec.structure(self.model, gather_embeddings=gather_embeddings)
        self.logits = Logits(self.model, self.spec)
        self.blocks = RecomputedBlocks(self.model)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _size(num_bytes: int) -> str:
    """Formats bytes, rounded up so that a budget of the text's size holds them."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{math.ceil(100 * num_bytes / unit) / 100:.2f} {name}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Lets a step be recorded under any modes of the caller; random states stay as they are."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        yield
