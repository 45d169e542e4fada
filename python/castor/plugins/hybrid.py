"""Several kinds of parallelism around one model (Colossal-AI's HybridParallelPlugin)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from castor.config.block_choice import BlockChoice
from castor.config.layout_plan import planned_layout
from castor.config.names import SPLIT_GATHER, Activations, PipelineStyle
from castor.distributed import Microbatches, Mode, Plan
from castor.plugins.gemini import GeminiPlugin
from castor.plugins.parallelize import ParallelConfig, PipelineConfig

_STYLES: tuple[str, ...] = get_args(PipelineStyle)
_STAGES_OF_A_RANK = {"interleaved": 2, "zbv": 2}
"""The num_model_chunks that a pp_style needs at least; the others need 1."""
_MODES: tuple[str, ...] = (*get_args(Mode), SPLIT_GATHER)


class HybridParallelPlugin(GeminiPlugin):
    """Tensor, sequence, context, expert and pipeline parallelism over chunk-based memory.

    Tensor parallelism (Shoeybi et al. 2019, section 3): a rank has some heads of each attention,
    some hidden units of each MLP and some rows of the vocabulary. p.grad and optimizer.state are
    this rank's shards. Context parallelism with sp_size (Jacobs et al. 2023, section 3): each rank
    computes some of the tokens, and in attention some of the heads for all tokens. Expert
    parallelism (Lepikhin et al. 2020, section 3.1): a rank has some full experts of each layer. It
    computes all tokens of all ranks that chose them, with no capacity limit.

    Groups of tp_size * sp_size * pp_size ranks train one model with other data. The ranks of a
    group take the same full batches, as prepare_dataloader arranges. Ranks with the same shard of
    the model share optimizer states (ZeRO) as with GeminiPlugin.

    Args:
        plan: File written by `castor plan`, or "auto" for the plan of `castor run --plan`. The plan
            sets the sizes, sequence_parallelism_mode, schedule and activations. Where it counts on
            NVMe, it also sets host_memory, nvme_path and nvme_memory. None: the arguments set them.
        tp_size: Number of tensor-parallel ranks. It divides the number of attention heads, and
            either divides the number of key-value heads or is a multiple of it; as a multiple,
            several ranks share a head.
        parallel_output: Whether each rank computes transformers' loss of a causal language model
            from its shard of the vocabulary; only with tp_size > 1. No rank then has all logits:
            outputs of forwards with labels have none. False: every rank has all logits, and
            tile_logits is off.
        ep_size: Number of expert-parallel ranks, for transformers' mixtures of experts. With
            tp_size > 1 they are the tensor-parallel ranks. Otherwise they are ranks with data of
            their own, which have full copies of all other layers and exchange tokens at the
            experts. The number of experts need not be a multiple of ep_size.
        sp_size: Number of ranks that shard each sequence in forwards with gradients; in forwards
            without, each rank computes full sequences. It divides the length of sequences. For
            decoders of transformers whose attention goes through its registry. A loss covers all
            tokens; outputs with a loss have no logits.
        sequence_parallelism_mode: Way to compute attention over sharded sequences. "all_to_all":
            a rank has some heads for all tokens; sp_size divides the number of heads. "all_gather":
            a rank has its tokens, and the keys and values of all. "ring_attn": a rank has its
            tokens, and the keys and values of one rank after the other (Liu et al. 2023), so that
            no rank has all. "split_gather", without sp_size, is sequence parallelism between
            tensor-parallel layers (Korthikanti et al. 2022, section 4.2.2). There the
            tensor-parallel ranks shard the tokens of norms, dropouts and residuals. It is for
            models whose blocks castor knows, and tp_size divides the length of sequences. Default:
            "all_to_all".
        pp_size: Number of ranks that have the pipeline stages (Narayanan et al. 2021). For models
            of transformers whose hidden states go through one row of blocks, or two (T5: the
            encoder's and the decoder's). The loop calls booster.execute_pipeline instead of the
            model. With pp_size=1 the loop may call it too, where num_microbatches or
            microbatch_size is given: it then accumulates the micro-batches.
        pp_style: Pipeline schedule: "1f1b", "gpipe", "interleaved" or "zbv" (Qi et al. 2023,
            section 6). With "interleaved" each rank has num_model_chunks stages. With "zbv" each
            rank has two, the first rank the first and the last stage, and gradients of weights are
            computed later than those of hidden states.
        num_microbatches: Number of micro-batches of a batch; with "1f1b" at least pp_size, with
            "interleaved" a multiple of it.
        microbatch_size: Number of rows of a micro-batch, instead of num_microbatches.
        num_model_chunks: Number of stages of each rank. None: 2 with "interleaved" and "zbv", and 1
            otherwise.
        num_layers_per_stage: Number of blocks of each stage, an encoder's before its decoder's.
            None: so that the most expensive stage is as cheap as possible, by the elements of
            matrices.
        tp_plan: Tensor-parallel plan: names of modules and parameters (with ``*`` for numbers)
            and their styles; see castor.distributed.tensor_plan. Default: castor's plan for the
            model's family (BERT, BLOOM, Falcon, GPT-2, GPT-J, OPT, T5, ViT), or transformers'
            tp_plan.
        **gemini: GeminiPlugin's arguments; budgets are one rank's. With activations="auto" the
            ranks of tp_size, ep_size and sp_size decide alike.

    Raises:
        NotImplementedError: A setting does not go with the sizes; the message names it.
        ValueError: parallel_output=True with tp_size=1, or an argument that the plan sets was given
            as well; see GeminiPlugin.
        UsageError, OSError: There is no plan, or it cannot be read; see GeminiPlugin.
        TypeError, ImportError: See GeminiPlugin.
    """

    def __init__(
        self,
        plan: str | os.PathLike[str] | None = None,
        *,
        tp_size: int = 1,
        parallel_output: bool = False,
        ep_size: int = 1,
        sp_size: int = 1,
        sequence_parallelism_mode: str = "all_to_all",
        pp_size: int = 1,
        pp_style: str = "1f1b",
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        num_model_chunks: int | None = None,
        num_layers_per_stage: Sequence[int] | None = None,
        tp_plan: Plan | None = None,
        **gemini: Any,
    ) -> None:
        if plan is not None:
            given = {"tp_size": tp_size, "ep_size": ep_size, "sp_size": sp_size,
                     "pp_size": pp_size,
                     "sequence_parallelism_mode": sequence_parallelism_mode,
                     "pp_style": pp_style, "num_microbatches": num_microbatches,
                     "num_model_chunks": num_model_chunks}  # fmt: skip
            layout = _layout_of(plan, given, gemini)
            tp_size, ep_size = layout["tp_size"], layout["ep_size"]
            sp_size, pp_size = layout["sp_size"], layout["pp_size"]
            pp_style, num_microbatches = layout["pp_style"], layout["num_microbatches"]
            num_model_chunks = layout["num_model_chunks"]
            sequence_parallelism_mode = layout["sequence_parallelism_mode"]
        sizes = {"tp_size": tp_size, "ep_size": ep_size, "sp_size": sp_size, "pp_size": pp_size}
        if num_model_chunks is None:
            num_model_chunks = _STAGES_OF_A_RANK.get(pp_style, 1) if pp_size != 1 else 1
        for name, size in (*sizes.items(), ("num_model_chunks", num_model_chunks)):
            _check_count(name, size)
        stages = _stages(
            *(pp_size, pp_style, num_microbatches, microbatch_size, num_model_chunks),
            layers=num_layers_per_stage,
        )
        if sequence_parallelism_mode not in _MODES:
            known = ", ".join(map(repr, _MODES))
            ring = ". Colossal-AI's 'ring' computes what 'split_gather' does"
            raise NotImplementedError(
                f"sequence_parallelism_mode={sequence_parallelism_mode!r} is not supported; "
                f"{known} are{ring if sequence_parallelism_mode == 'ring' else ''}"
            )
        sequence_parallel = sequence_parallelism_mode == SPLIT_GATHER
        mode: Mode = "all_to_all" if sequence_parallel else cast("Mode", sequence_parallelism_mode)
        if sequence_parallel:
            _check_sequence_parallel(tp_size, sp_size)
        if tp_plan is not None and not isinstance(tp_plan, Mapping):
            raise TypeError(f"tp_plan is a {type(tp_plan).__name__}; give names and styles")
        if not isinstance(parallel_output, bool):
            raise TypeError(f"parallel_output is {parallel_output!r}; give True or False")
        if parallel_output and tp_size == 1:
            raise ValueError(
                "parallel_output=True shards the loss over ranks that shard the vocabulary, and "
                "with tp_size=1 there are none; leave it out, or give a tp_size of 2 or more"
            )
        if tp_size > 1 and ep_size not in (1, tp_size):
            raise NotImplementedError(
                f"ep_size={ep_size} does not go with tp_size={tp_size}: the tensor-parallel ranks "
                f"are the expert-parallel ones; give ep_size={tp_size}, or tp_size=1"
            )
        if tp_size > 1:
            _check_tensor_parallel(gemini, tp_size, vocab_parallel_loss=parallel_output)
            if not parallel_output:
                gemini["tile_logits"] = False
        if pp_size > 1 and pp_style == "zbv":
            if gemini.get("activations") is None:
                gemini["activations"] = "keep"
            _check_kept(gemini["activations"])
        super().__init__(**gemini)
        self._parallel_config = ParallelConfig(
            tensor_size=tp_size,
            expert_size=ep_size,
            sequence_size=sp_size,
            sequence_mode=mode,
            sequence_parallel=sequence_parallel,
            plan=tp_plan,
            loss=parallel_output,
            stages=stages,
        )


def _layout_of(
    plan: str | os.PathLike[str], given: Mapping[str, Any], gemini: dict[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of this plugin and of GeminiPlugin that a plan sets.

    Raises:
        ValueError: An argument that the plan sets was given as well.
        UsageError, OSError: See planned_layout.
    """
    planned = planned_layout(plan)
    defaults = inspect.signature(HybridParallelPlugin.__init__).parameters
    twice = [name for name, value in given.items() if value != defaults[name].default]
    twice += [name for name in planned.keys() - given.keys() if name in gemini]
    if twice:
        raise ValueError(
            f"{min(twice)} is given beside a plan, which says what it is; leave it out"
        )
    gemini |= {name: planned[name] for name in planned.keys() - given.keys()}
    return {**given, **{name: planned[name] for name in given if name in planned}}


def _check_sequence_parallel(tp_size: int, sp_size: int) -> None:
    """Raises ValueError or NotImplementedError unless "split_gather" fits the sizes."""
    asked = f"sequence_parallelism_mode={SPLIT_GATHER!r}"
    if tp_size == 1:
        raise ValueError(
            f"{asked} shards tokens between the layers that tp_size ranks shard, and with "
            "tp_size=1 none are; give a tp_size of 2 or more, or sp_size with another mode"
        )
    if sp_size > 1:
        raise NotImplementedError(
            f"{asked} does not go with sp_size={sp_size}: leave sp_size out, or give another mode"
        )


def _check_count(name: str, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} is {count!r}; give a whole number")
    if count < 1:
        raise ValueError(f"{name} is {count}; give 1 or more")


def _stages(
    size: int,
    style: str,
    num_microbatches: int | None,
    microbatch_size: int | None,
    chunks: int,
    *,
    layers: Sequence[int] | None,
) -> PipelineConfig | None:
    """Returns the pipeline stages that the arguments ask for; None: they ask for none.

    Raises:
        TypeError, ValueError: An argument is wrong, or two contradict each other.
    """
    given = {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size}
    asked = {name: count for name, count in given.items() if count is not None}
    for name, count in asked.items():
        _check_count(name, count)
    if size == 1 and (chunks > 1 or layers is not None):
        name = "num_model_chunks" if chunks > 1 else "num_layers_per_stage"
        raise ValueError(f"{name} splits stages, and with pp_size=1 there is one; leave it out")
    if size == 1 and not asked:
        return None
    if style not in _STYLES:
        known = ", ".join(map(repr, _STYLES))
        raise ValueError(f"pp_style={style!r} is not known; {known} are")
    if size > 1 and style == "zbv" and chunks != 2:
        raise ValueError(
            f"num_model_chunks={chunks} and pp_style='zbv' contradict each other: each rank has "
            "two stages, of which the way through the model is a V; give num_model_chunks=2"
        )
    if size > 1 and style != "zbv" and (style == "interleaved") != (chunks > 1):
        raise ValueError(
            f"num_model_chunks={chunks} and pp_style={style!r} contradict each other: stages of a "
            "rank are interleaved where there are several"
        )
    if len(asked) != 1:
        raise ValueError(f"give num_microbatches or microbatch_size, and not both: pp_size={size}")
    if num_microbatches is not None:
        if style == "1f1b" and num_microbatches < size:
            raise ValueError(
                f"num_microbatches={num_microbatches} is less than pp_size={size}, which "
                "pp_style='1f1b' needs; give more, or 'gpipe'"
            )
        if style == "interleaved" and num_microbatches % size:
            raise ValueError(
                f"num_microbatches={num_microbatches} is no multiple of pp_size={size}, which "
                "pp_style='interleaved' needs"
            )
    return PipelineConfig(
        size=size,
        chunks=chunks,
        style=cast("PipelineStyle", style),
        microbatches=Microbatches(count=num_microbatches, size=microbatch_size),
        layers=layers,
    )


def _check_kept(activations: Activations) -> None:
    """Raises NotImplementedError if backward would run forwards again, which "zbv" cannot do."""
    chosen = [activations] if isinstance(activations, str) else activations.values()
    for text in chosen:
        choice = BlockChoice.parse("recompute" if text == "auto" else text)  # as "auto" begins
        if choice.kind == "recompute" or choice.tiles:
            raise NotImplementedError(
                f"activations={text!r} does not go with pp_style='zbv', whose weights' gradients "
                "are computed one by one, later: for each a forward would run again. Give 'keep' "
                "or 'offload', or pp_style='interleaved'"
            )


def _check_tensor_parallel(
    gemini: Mapping[str, Any], size: int, *, vocab_parallel_loss: bool
) -> None:
    if gemini.get("tile_logits", "auto") not in ("auto", False) and not vocab_parallel_loss:
        raise NotImplementedError(
            f"tile_logits={gemini['tile_logits']!r} leaves logits to the loss, and each of tp_size="
            f"{size} ranks has some columns of them: give parallel_output=True, which shards the "
            "loss as well, or leave it out"
        )
    if gemini.get("gather_embeddings"):
        raise NotImplementedError(
            f"gather_embeddings=True reads full embeddings, and tp_size={size} ranks shard them; "
            "leave it out"
        )
