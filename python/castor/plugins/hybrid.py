"""Several kinds of parallelism around one model (Colossal-AI's HybridParallelPlugin)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castor.distributed import Plan
from castor.plugins.gemini import GeminiPlugin


class HybridParallelPlugin(GeminiPlugin):
    """Divides each layer of a model among neighbouring ranks, which train it as one.

    Tensor parallelism (Shoeybi et al. 2019, section 3): of each attention and MLP a rank has some
    heads and hidden units, and of the vocabulary some rows. Groups of tp_size ranks train copies
    with other data, and share optimizer states (ZeRO) as with GeminiPlugin. All ranks of a group
    take the same batches, which prepare_dataloader sees to; p.grad and optimizer.state are of a
    rank's part.

    Args:
        tp_size: Ranks among which layers are divided; it divides the number of ranks, and the
            numbers of heads.
        tp_plan: How, as names of modules and parameters (with * for numbers) and styles; see
            castor.distributed.tensor_plan. Default: castor's plan for the model's family (BERT,
            BLOOM, Falcon, GPT-2, GPT-J, OPT, T5, ViT), or else transformers' tp_plan.
        **gemini: GeminiPlugin's arguments; budgets are one rank's. tile_logits is off, and
            activations may not be "auto".

    Raises:
        NotImplementedError: pp_size, sp_size or ep_size other than 1, or a setting that does not go
            with tp_size > 1; the message names it.
        ValueError, TypeError, UsageError, ImportError: See GeminiPlugin.
    """

    def __init__(self, *, tp_size: int, tp_plan: Plan | None = None, **gemini: Any) -> None:
        if isinstance(tp_size, bool) or not isinstance(tp_size, int):
            raise TypeError(f"tp_size is {tp_size!r}; give a number of ranks")
        if tp_size < 1:
            raise ValueError(f"tp_size is {tp_size}; give 1 or more")
        if tp_plan is not None and not isinstance(tp_plan, Mapping):
            raise TypeError(f"tp_plan is a {type(tp_plan).__name__}; give names and styles")
        if tp_size > 1:
            _check(gemini, tp_size)
            gemini["tile_logits"] = False
        super().__init__(**gemini)
        self._tensor_size = tp_size
        self._tensor_plan = tp_plan


def _check(gemini: Mapping[str, Any], size: int) -> None:
    if gemini.get("tile_logits", "auto") not in ("auto", False):
        raise NotImplementedError(
            f"tile_logits={gemini['tile_logits']!r} needs whole output embeddings, and tp_size="
            f"{size} ranks divide them; leave it out"
        )
    if gemini.get("activations") == "auto":
        raise NotImplementedError(
            f"activations='auto' decides on each rank alone, and tp_size={size} ranks have to "
            "compute the same; give 'keep', 'recompute' or 'offload'"
        )
    if gemini.get("gather_embeddings"):
        raise NotImplementedError(
            f"gather_embeddings=True reads whole embeddings, and tp_size={size} ranks divide them; "
            "leave it out"
        )
