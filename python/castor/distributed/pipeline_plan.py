"""Plans that split models into pipeline stages: castor's own, or transformers' pp_plan."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The modules of a model whose hidden states go through a row of blocks, by their names."""

    before: tuple[str, ...]
    """Modules that make hidden states from the inputs."""
    blocks: str
    """The ModuleList of the blocks."""
    after: tuple[str, ...]
    """Modules that make outputs from the last hidden states."""
    in_tuples: bool = False
    """Whether a block returns its hidden states as the first item of a tuple."""
    images: bool = False
    """Whether the inputs are images: a class token, then one token for each patch."""
    base: str = ""
    """The module whose forward runs all of these modules; empty: the model itself."""
    bias: str = ""
    """Name, in the first block, of the attention that computes the position bias for later blocks
    (compute_bias of transformers' T5 attention). Empty: there is none."""
    encoder: PipelinePlan | None = None
    """Plan of another row, which runs first. All blocks of this row take its base's outputs too."""

    @property
    def rows(self) -> tuple[PipelinePlan, ...]:
        """Rows of blocks, in the order in which they run."""
        return (self.encoder, self) if self.encoder else (self,)

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Returns the blocks of all rows, in order."""
        return [block for row in self.rows for block in row.blocks_of_row(model).values()]

    def blocks_of_row(self, model: nn.Module) -> dict[str, nn.Module]:
        """Returns the blocks of this row, by their names in it."""
        return dict(model.get_submodule(self.blocks).named_children())

    def within(self, base: nn.Module, prefix: str) -> PipelinePlan:
        """Returns this plan of a base model, with names as they are in the model around it.

        Args:
            base: Base model that the names belong to; modules that it lacks are left out.
            prefix: Prefix of the base model's names in the model around it.
        """
        return replace(
            self,
            before=_present(base, prefix, self.before),
            blocks=prefix + self.blocks,
            after=_present(base, prefix, self.after),
            base=prefix + self.base if self.base else prefix[:-1],
            encoder=self.encoder.within(base, prefix) if self.encoder else None,
        )


_UMT5 = PipelinePlan(
    before=("decoder.embed_tokens",),
    blocks="decoder.block",
    after=("decoder.final_layer_norm", "lm_head"),
    encoder=PipelinePlan(
        before=("shared", "encoder.embed_tokens"),
        blocks="encoder.block",
        after=("encoder.final_layer_norm",),
        base="encoder",
    ),
)
"""T5 with a position bias in each block."""
_BIAS = "layer.0.SelfAttention"
_T5 = replace(_UMT5, bias=_BIAS, encoder=replace(_UMT5.rows[0], bias=_BIAS))
_OURS = {
    "bert": PipelinePlan(before=("embeddings",), blocks="encoder.layer", after=("pooler",)),
    "bloom": PipelinePlan(
        before=("word_embeddings", "word_embeddings_layernorm"),
        blocks="h",
        after=("ln_f",),
        in_tuples=True,
    ),
    "falcon": PipelinePlan(
        before=("word_embeddings",), blocks="h", after=("ln_f",), in_tuples=True
    ),
    "gpt2": PipelinePlan(before=("wte", "wpe", "drop"), blocks="h", after=("ln_f",)),
    "gptj": PipelinePlan(before=("wte", "drop"), blocks="h", after=("ln_f",), in_tuples=True),
    "mt5": _T5,
    "olmoe": PipelinePlan(before=("embed_tokens",), blocks="layers", after=("norm",)),
    "opt": PipelinePlan(
        before=("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
        blocks="decoder.layers",
        after=("decoder.final_layer_norm", "decoder.project_out"),
    ),
    "t5": _T5,
    "umt5": _UMT5,
    "vit": PipelinePlan(
        before=("embeddings",), blocks="layers", after=("layernorm", "pooler"), images=True
    ),
}
"""Castor's own plans, by model_type of the configuration. Names are those in the base model."""
_BLOCKS_OF_THEIRS = "layers"
SHIFT = "prepare_decoder_input_ids_from_labels"
"""Method of transformers that makes a decoder's inputs from labels."""


def find_pipeline_plan(model: nn.Module) -> PipelinePlan:
    """Returns the plan that splits this model into stages.

    Raises:
        NotImplementedError: There is no plan for the model, or it is not built as its plan says.
    """
    planned = _base_and_plan(model)
    if planned is None:
        raise NotImplementedError(
            f"castor cannot split a {type(model).__name__} into stages, and transformers "
            f"has no pp_plan for it. Castor's own: {', '.join(sorted(_OURS))}; with pp_size=1 "
            "layers (tp_size) and data are still sharded"
        )
    base, plan = planned
    if plan.images and base is not model and _takes_masks(model):
        raise NotImplementedError(
            f"a {type(model).__name__} makes images again of its last hidden states, and castor "
            "splits image models whose loss is of labels only; give pp_size=1"
        )
    if plan.encoder and not hasattr(model, SHIFT):
        raise NotImplementedError(
            f"castor splits encoder-decoders that make tokens of tokens into stages "
            f"(ForConditionalGeneration), and a {type(model).__name__} is none; give pp_size=1"
        )
    if taken := [name for block in plan.blocks_of(base) for name in _of_the_block_before(block)]:
        raise NotImplementedError(
            f"each block of this {type(model).__name__} takes '{taken[0]}' of the one before, and "
            "castor passes hidden states alone from stage to stage; give pp_size=1"
        )
    outside = [
        name for name, part in model.named_children() if part is not base and _has_parameters(part)
    ]
    found = plan.within(base, _prefix_of(model, base))
    if base is not model:
        found = replace(found, after=(*found.after, *outside))
    parts = [name for row in found.rows for name in (*row.before, row.blocks, *row.after)]
    divided = tuple(f"{name}." for name in parts)
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not name.startswith(divided):
            raise NotImplementedError(
                f"parameter '{name}' of this {type(model).__name__} is in none of the modules that "
                f"pp_size splits ({', '.join(parts)}); give pp_size=1"
            )
    return found


def find_blocks(model: nn.Module) -> str | None:
    """Returns the name of the row of blocks, for sequence parallelism; None: castor knows none."""
    planned = _base_and_plan(model)
    # Images have a token for each patch and one more, which seldom divide evenly.
    if planned is None or planned[1].images or planned[1].encoder:
        return None
    base, plan = planned
    return _prefix_of(model, base) + plan.blocks


def _base_and_plan(model: nn.Module) -> tuple[nn.Module, PipelinePlan] | None:
    """Returns a model's base model and the plan for it; None: there is no plan."""
    base: Any = getattr(model, "base_model", None)
    config: Any = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", ""))
    plan = _OURS.get(kind) or _from_theirs(getattr(config, "base_model_pp_plan", None))
    if base is None or plan is None or not isinstance(_child(base, plan.blocks), nn.ModuleList):
        return None
    return base, plan


def _of_the_block_before(block: nn.Module) -> list[str]:
    """Returns the arguments that a block takes from the one before, besides hidden states.

    transformers names them prev_... (the chosen tokens of GLM).
    """
    return [name for name in inspect.signature(block.forward).parameters if name[:5] == "prev_"]


def _takes_masks(model: nn.Module) -> bool:
    """Whether the model learns to fill in masked patches."""
    return "bool_masked_pos" in inspect.signature(model.forward).parameters


def _prefix_of(model: nn.Module, base: nn.Module) -> str:
    return next((f"{name}." for name, part in model.named_modules() if part is base and name), "")


def _from_theirs(plan: Any) -> PipelinePlan | None:
    """Makes a plan from transformers' pp_plan, whose names are in order of computation."""
    if not isinstance(plan, Mapping) or _BLOCKS_OF_THEIRS not in plan:
        return None
    names = [str(name) for name in plan]
    at = names.index(_BLOCKS_OF_THEIRS)
    return PipelinePlan(
        before=tuple(names[:at]), blocks=_BLOCKS_OF_THEIRS, after=tuple(names[at + 1 :])
    )


def _present(base: nn.Module, prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the modules that the model has; its configuration may leave some out."""
    return tuple(prefix + name for name in names if _child(base, name) is not None)


def _child(base: nn.Module, name: str) -> nn.Module | None:
    found: Any = base
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def cheapest_cuts(model: nn.Module, plan: PipelinePlan, stages: int) -> list[int]:
    """Returns the number of blocks of each stage, balanced by cost; see even_cuts."""
    behind = sum(_cost(model.get_submodule(name)) for name in plan.after)
    return even_cuts([_cost(block) for block in plan.blocks_of(model)], behind, stages)


def _cost(module: nn.Module) -> float:
    """Returns the elements of a module's matrices, in proportion to its operations for a token."""
    return float(sum(param.numel() for param in module.parameters() if param.ndim > 1))


def even_cuts(costs: Sequence[float], last: float, stages: int) -> list[int]:
    """Returns the number of blocks of each stage that makes the most expensive stage cheapest.

    Each stage has one block at least: hidden states are sent where the next stage's first block
    would begin.

    Args:
        costs: Cost of each block.
        last: Cost of the modules that the last stage runs besides blocks.
        stages: Number of stages; at most the number of blocks.
    """
    return list(_even_cuts(tuple(costs), last, stages))


@functools.cache
def _even_cuts(costs: tuple[float, ...], last: float, stages: int) -> tuple[int, ...]:
    upto = [0.0, *itertools.accumulate(costs)]
    count = len(costs)
    # best[n]: the cheapest (maximum, cuts) of the first n blocks over the stages so far.
    none = (math.inf, list[int]())
    best = [none, *((upto[n], [n]) for n in range(1, count + 1))]
    for stage in range(1, stages):
        extra = last if stage == stages - 1 else 0.0
        of_next = [none]
        for n in range(1, count + 1):
            most = [max(best[k][0], upto[n] - upto[k] + extra) for k in range(n)]
            least = min(most)
            cuts = min([*best[k][1], n - k] for k in range(n) if most[k] == least)
            of_next.append((least, cuts))
        best = of_next
    return tuple(best[count][1])
