"""Several kinds of parallelism around one model (Colossal-AI's HybridParallelPlugin)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castor.distributed import Plan
from castor.plugins.divide import Division
from castor.plugins.gemini import GeminiPlugin


class HybridParallelPlugin(GeminiPlugin):
    """Divides layers and sequences among neighbouring ranks, which train one model.

    Tensor parallelism (Shoeybi et al. 2019, section 3): of each attention and MLP a rank has some
    heads and hidden units, and of the vocabulary some rows; p.grad and optimizer.state are of a
    rank's part. Sequence parallelism (Jacobs et al. 2023, section 3): each rank computes some of
    the tokens, and in attention some of the heads for all tokens. Groups of tp_size * sp_size ranks
    train with other data, and share optimizer states (ZeRO) as with GeminiPlugin. All ranks of a
    group take the same whole batches, which prepare_dataloader sees to.

    Args:
        tp_size: Ranks among which layers are divided. It divides the numbers of heads.
        parallel_output: Only with tp_size > 1: whether transformers' loss of a causal language
            model is computed of each rank's part of the vocabulary, and nobody has all logits:
            outputs of forwards with labels have none. False: every rank has them.
        sp_size: Ranks among which sequences are divided while there are gradients; without, each
            computes whole ones. It divides sequences and the attention heads that a rank has. For
            decoders of transformers whose attention goes through its registry. A loss is that of
            all tokens; beside it there are no logits.
        sequence_parallelism_mode: Only "all_to_all".
        tp_plan: How layers are divided, as names of modules and parameters (with * for numbers) and
            styles; see castor.distributed.tensor_plan. Default: castor's plan for the model's
            family (BERT, BLOOM, Falcon, GPT-2, GPT-J, OPT, T5, ViT), or transformers' tp_plan.
        **gemini: GeminiPlugin's arguments; budgets are one rank's. activations may not be "auto";
            with tp_size > 1 tile_logits is off.

    Raises:
        NotImplementedError: pp_size or ep_size other than 1, or a setting that does not go with the
            sizes; the message names it.
        ValueError: parallel_output=True with tp_size=1; see GeminiPlugin.
        TypeError, UsageError, ImportError: See GeminiPlugin.
    """

    def __init__(
        self,
        *,
        tp_size: int = 1,
        parallel_output: bool = False,
        sp_size: int = 1,
        sequence_parallelism_mode: str | None = None,
        tp_plan: Plan | None = None,
        **gemini: Any,
    ) -> None:
        for name, size in (("tp_size", tp_size), ("sp_size", sp_size)):
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name} is {size!r}; give a number of ranks")
            if size < 1:
                raise ValueError(f"{name} is {size}; give 1 or more")
        if sequence_parallelism_mode not in (None, "all_to_all"):
            raise NotImplementedError(
                f"sequence_parallelism_mode={sequence_parallelism_mode!r} is not supported; "
                "'all_to_all' is"
            )
        if tp_plan is not None and not isinstance(tp_plan, Mapping):
            raise TypeError(f"tp_plan is a {type(tp_plan).__name__}; give names and styles")
        if not isinstance(parallel_output, bool):
            raise TypeError(f"parallel_output is {parallel_output!r}; give True or False")
        if parallel_output and tp_size == 1:
            raise ValueError(
                "parallel_output=True divides the loss among ranks that divide the vocabulary, and "
                "with tp_size=1 there are none; leave it out, or give a tp_size of 2 or more"
            )
        if tp_size * sp_size > 1 and gemini.get("activations") == "auto":
            raise NotImplementedError(
                "activations='auto' decides on each rank alone, and ranks that share layers or "
                "sequences have to compute the same; give 'keep', 'recompute' or 'offload'"
            )
        if tp_size > 1:
            _check_divided_layers(gemini, tp_size)
            gemini["tile_logits"] = False
        super().__init__(**gemini)
        self._division = Division(
            tensor_size=tp_size, sequence_size=sp_size, plan=tp_plan, loss=parallel_output
        )


def _check_divided_layers(gemini: Mapping[str, Any], size: int) -> None:
    if gemini.get("tile_logits", "auto") not in ("auto", False):
        raise NotImplementedError(
            f"tile_logits={gemini['tile_logits']!r} needs whole output embeddings, and tp_size="
            f"{size} ranks divide them; leave it out"
        )
    if gemini.get("gather_embeddings"):
        raise NotImplementedError(
            f"gather_embeddings=True reads whole embeddings, and tp_size={size} ranks divide them; "
            "leave it out"
        )
