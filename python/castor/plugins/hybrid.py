"""Several kinds of parallelism around one model (Colossal-AI's HybridParallelPlugin)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, cast, get_args

from castor.config import GeminiArguments
from castor.config.block_choice import BlockChoice
from castor.config.declared import at_least, documented, types_of
from castor.config.files import LAYOUT, planned_layout
from castor.config.names import SPLIT_GATHER, Activations, PipelineStyle
from castor.distributed import Microbatches, Mode, Plan
from castor.plugins.arguments import takes
from castor.plugins.gemini import GeminiPlugin
from castor.plugins.parallelize import ParallelConfig, PipelineConfig
from castor.runtime.parallel_dims import ParallelDims

_STAGES_OF_A_RANK = {"interleaved": 2, "zbv": 2}
"""The num_model_chunks that a pp_style needs at least; the others need 1."""
_MODES: tuple[str, ...] = (*get_args(Mode), SPLIT_GATHER)
_Count = Annotated[int, at_least(1)]


def _check_tp_plan(value: object, name: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}; give names and styles")


@dataclass(frozen=True, kw_only=True)
class HybridArguments(GeminiArguments):
    """Arguments of HybridParallelPlugin, as a user gives them."""

    plan: str | os.PathLike[str] | None = field(default=None, kw_only=False)
    """File written by `castor plan`, or "auto" for the plan of `castor run --plan`. The plan sets
    the sizes, sequence_parallelism_mode, schedule and activations. Where it counts on NVMe, it also
    sets host_memory, nvme_path and nvme_memory. None: the arguments set them."""
    tp_size: _Count = 1
    """Number of tensor-parallel ranks. It divides the number of attention heads, and either divides
    the number of key-value heads or is a multiple of it; as a multiple, several ranks share a
    head."""
    parallel_output: bool = False
    """Whether each rank computes transformers' loss of a causal language model from its shard of
    the vocabulary; only with tp_size > 1. No rank then has all logits: outputs of forwards with
    labels have none. False: every rank has all logits, and tile_logits is off."""
    ep_size: _Count = 1
    """Number of expert-parallel ranks, for transformers' mixtures of experts. With tp_size > 1 they
    are the tensor-parallel ranks. Otherwise they are ranks with data of their own, which have full
    copies of all other layers and exchange tokens at the experts. The number of experts need not be
    a multiple of ep_size."""
    sp_size: _Count = 1
    """Number of ranks that shard each sequence in forwards with gradients; in forwards without,
    each rank computes full sequences. It divides the length of sequences. For decoders of
    transformers whose attention goes through its registry. A loss covers all tokens; outputs with a
    loss have no logits."""
    sequence_parallelism_mode: str = "all_to_all"
    """Way to compute attention over sharded sequences. "all_to_all": a rank has some heads for all
    tokens; sp_size divides the number of heads. "all_gather": a rank has its tokens, and the keys
    and values of all. "ring_attn": a rank has its tokens, and the keys and values of one rank after
    the other (Liu et al. 2023), so that no rank has all. "split_gather", without sp_size, is
    sequence parallelism between tensor-parallel layers (Korthikanti et al. 2022, section 4.2.2).
    There the tensor-parallel ranks shard the tokens of norms, dropouts and residuals. It is for
    models whose blocks castor knows, and tp_size divides the length of sequences. Default:
    "all_to_all"."""
    pp_size: _Count = 1
    """Number of ranks that have the pipeline stages (Narayanan et al. 2021). For models of
    transformers whose hidden states go through one row of blocks, or two (T5: the encoder's and the
    decoder's). The loop calls booster.execute_pipeline instead of the model. With pp_size=1 the
    loop may call it too, where num_microbatches or microbatch_size is given: it then accumulates
    the micro-batches."""
    pp_style: PipelineStyle = "1f1b"
    """Pipeline schedule: "1f1b", "gpipe", "interleaved" or "zbv" (Qi et al. 2023, section 6). With
    "interleaved" each rank has num_model_chunks stages. With "zbv" each rank has two, the first
    rank the first and the last stage, and gradients of weights are computed later than those of
    hidden states."""
    num_microbatches: _Count | None = None
    """Number of micro-batches of a batch; with "1f1b" at least pp_size, with "interleaved" a
    multiple of it."""
    microbatch_size: _Count | None = None
    """Number of rows of a micro-batch, instead of num_microbatches."""
    num_model_chunks: _Count | None = None
    """Number of stages of each rank. None: 2 with "interleaved" and "zbv", and 1 otherwise."""
    num_layers_per_stage: Sequence[int] | None = None
    """Number of blocks of each stage, an encoder's before its decoder's. None: so that the most
    expensive stage is as cheap as possible, by the elements of matrices."""
    tp_plan: Annotated[Plan, _check_tp_plan] | None = None
    """Tensor-parallel plan: names of modules and parameters (with ``*`` for numbers) and their
    styles; see castor.distributed.tensor_plan. Default: castor's plan for the model's family (BERT,
    BLOOM, Falcon, GPT-2, GPT-J, OPT, T5, ViT), or transformers' tp_plan."""


@documented(HybridArguments, besides=GeminiArguments)
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
        **arguments: The fields of HybridArguments, by name.
        **gemini: GeminiPlugin's arguments; budgets are one rank's. With activations="auto" the
            ranks of tp_size, ep_size and sp_size decide alike.

    Raises:
        NotImplementedError: A setting does not go with the sizes; the message names it.
        ValueError: parallel_output=True with tp_size=1, or an argument that the plan sets was given
            as well; see GeminiPlugin.
        UsageError, OSError: There is no plan, or it cannot be read; see GeminiPlugin.
        TypeError, ImportError: See GeminiPlugin.
    """

    @takes(HybridArguments)
    def __init__(self, arguments: HybridArguments) -> None:
        if arguments.plan is not None:
            arguments = _with_plan(arguments)
        tp_size, ep_size, sp_size = arguments.tp_size, arguments.ep_size, arguments.sp_size
        stages = _stages(arguments)
        asked_mode = arguments.sequence_parallelism_mode
        if asked_mode not in _MODES:
            known = ", ".join(map(repr, _MODES))
            ring = ". Colossal-AI's 'ring' computes what 'split_gather' does"
            raise NotImplementedError(
                f"sequence_parallelism_mode={asked_mode!r} is not supported; {known} are"
                f"{ring if asked_mode == 'ring' else ''}"
            )
        sequence_parallel = asked_mode == SPLIT_GATHER
        mode: Mode = "all_to_all" if sequence_parallel else cast("Mode", asked_mode)
        if sequence_parallel:
            _check_sequence_parallel(tp_size, sp_size)
        if arguments.parallel_output and tp_size == 1:
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
            _check_tensor_parallel(arguments)
            if not arguments.parallel_output:
                arguments = replace(arguments, tile_logits=False)
        if arguments.pp_size > 1 and arguments.pp_style == "zbv":
            if arguments.activations is None:
                arguments = replace(arguments, activations="keep")
            _check_kept(arguments.activations or "keep")
        self._resolve(arguments)
        self._parallel_config = ParallelConfig(
            dims=ParallelDims.of_one_replica(
                cp=sp_size, tp=tp_size, pp=arguments.pp_size, ep=ep_size
            ),
            sequence_mode=mode,
            sequence_parallel=sequence_parallel,
            plan=arguments.tp_plan,
            loss=arguments.parallel_output,
            stages=stages,
        )


def _with_plan(arguments: HybridArguments) -> HybridArguments:
    """Returns the arguments with those that a plan sets.

    Raises:
        ValueError: An argument that the plan sets was given as well.
        UsageError, OSError: See planned_layout.
    """
    planned = planned_layout(cast("str", arguments.plan))
    defaults = HybridArguments()
    names = planned.keys() | (set(LAYOUT) - types_of(GeminiArguments).keys())
    twice = [name for name in names if getattr(arguments, name) != getattr(defaults, name)]
    if twice:
        raise ValueError(
            f"{min(twice)} is given beside a plan, which says what it is; leave it out"
        )
    return replace(arguments, **planned)


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


def _stages(arguments: HybridArguments) -> PipelineConfig | None:
    """Returns the pipeline stages that the arguments ask for; None: they ask for none."""
    size, style, layers = arguments.pp_size, arguments.pp_style, arguments.num_layers_per_stage
    count, rows = arguments.num_microbatches, arguments.microbatch_size
    chunks = arguments.num_model_chunks or (_STAGES_OF_A_RANK.get(style, 1) if size > 1 else 1)
    if size == 1 and (chunks > 1 or layers is not None):
        name = "num_model_chunks" if chunks > 1 else "num_layers_per_stage"
        raise ValueError(f"{name} splits stages, and with pp_size=1 there is one; leave it out")
    if size == 1 and count is None and rows is None:
        return None
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
    if (count is None) == (rows is None):
        raise ValueError(f"give num_microbatches or microbatch_size, and not both: pp_size={size}")
    if count is not None:
        if style == "1f1b" and count < size:
            raise ValueError(
                f"num_microbatches={count} is less than pp_size={size}, which "
                "pp_style='1f1b' needs; give more, or 'gpipe'"
            )
        if style == "interleaved" and count % size:
            raise ValueError(
                f"num_microbatches={count} is no multiple of pp_size={size}, which "
                "pp_style='interleaved' needs"
            )
    return PipelineConfig(
        chunks=chunks,
        style=style,
        microbatches=Microbatches(count=count, size=rows),
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


def _check_tensor_parallel(arguments: HybridArguments) -> None:
    size, tile_logits = arguments.tp_size, arguments.tile_logits
    if tile_logits not in ("auto", False) and not arguments.parallel_output:
        raise NotImplementedError(
            f"tile_logits={tile_logits!r} leaves logits to the loss, and each of tp_size="
            f"{size} ranks has some columns of them: give parallel_output=True, which shards the "
            "loss as well, or leave it out"
        )
    if arguments.gather_embeddings:
        raise NotImplementedError(
            f"gather_embeddings=True reads full embeddings, and tp_size={size} ranks shard them; "
            "leave it out"
        )
