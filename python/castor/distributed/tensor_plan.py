"""Tensor-parallel plans: castor's own for some families, transformers' for all others.

A plan maps names of modules and parameters, with `*` for numbers, to styles:

    colwise                  column-parallel linear layer: its outputs stay sharded
    colwise:3                ... with 3 pieces of outputs, one behind the other (fused q, k, v)
    colwise_shared:2,16      ... where 2 neighbours share a group: both have its last 16 outputs
    colwise_gather_output    ... whose outputs are all-gathered (also colwise_rep)
    rowwise                  row-parallel linear layer: sharded inputs, its outputs are all-reduced
    rowwise_split_input      ... whose input is full: each rank takes its slice (also rowwise_rep)
    embedding_rowwise        vocab-parallel embedding
    heads                    an embedding whose columns are heads, which stay sharded
    replicated_with_grad_allreduce   full parameters that act on shards of activations
    packed_colwise, rowwise  for the name of a parameter: sharded as in such a layer
    moe_tp_experts           a module of experts whose parameters are sharded by these styles
    whole_experts            a module of experts: each rank has some, and all have the same tokens
    exchanged_experts        ... and each rank has other tokens (expert parallel)
    all_reduce               a module whose outputs are summed over the ranks
    sharded:a,b              attributes of a module that count heads: divided by tp_size
    set:a=2                  an attribute of a module that is set to 2 where heads are sharded
    heads_of:a               an argument of forward whose first dimension is batch x heads

Several styles of one name are given as a tuple.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from castor.errors import UsageError

# --- Finds the tensor-parallel regions of a plan, from its names and styles alone -----------------

COLUMNS = frozenset({"colwise", "packed_colwise", "colwise_shared"})
"""Styles of layers whose outputs stay sharded (column-parallel)."""
GATHERED_COLUMNS = frozenset({"colwise_gather_output", "colwise_rep"})
"""Styles of column-parallel layers whose outputs are all-gathered."""
ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
"""Styles of layers whose outputs are summed over the ranks (row-parallel)."""
OF_HEADS = frozenset({"sharded", "heads_of", "set"})
"""Styles of modules that count heads. They say nothing about parameters."""

Kinds = Mapping[str, set[str]]
"""Styles by name, without their arguments."""


def kinds_of(plan: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """Returns a plan's styles without their arguments; see castor.distributed.tensor_plan."""
    return {name: {style.partition(":")[0] for style in given} for name, given in plan.items()}


def upwards(name: str) -> Iterator[str]:
    """Returns a module's name, its parent's name, and so on up to the outermost."""
    parts = name.split(".")
    return (".".join(parts[:upto]) for upto in range(len(parts), 0, -1))


def region_of(above: Sequence[str], kinds: Kinds) -> str | None:
    """Returns the tensor-parallel region of a layer; None: no module is around it.

    The region is the innermost module around the layer that counts heads, or else its parent.

    Args:
        above: Names of the modules around the layer, from its parent on.
        kinds: Styles of the plan; see kinds_of.
    """
    counting = (one for one in above if OF_HEADS & kinds.get(one, set()))
    return next(counting, above[0] if above else None)


# --- Modules that ranks may not call alone, because only the full model's call is sharded ---------


def modules_enclosing_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Returns the modules between the model and its blocks, such as transformers' base model.

    A call of such a module computes hidden states without the hooks of the model's own call.
    """
    rows = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    outermost = [name for name in rows if not any(above in rows for above in [*upwards(name)][1:])]
    names = dict.fromkeys(above for name in outermost for above in [*upwards(name)][1:])
    return map(model.get_submodule, names)


# --- Tensor-parallel plans: castor's own for some families, transformers' for all others ----------

Plan = Mapping[str, str | tuple[str, ...]]

_GPT2 = {
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn": "sharded:num_heads,split_size",
    "transformer.h.*.attn.c_attn": "colwise:3",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
_OPT = {
    "model.decoder.embed_tokens": "embedding_rowwise",
    "model.decoder.layers.*.self_attn": "sharded:num_heads",
    "model.decoder.layers.*.self_attn.q_proj": "colwise",
    "model.decoder.layers.*.self_attn.k_proj": "colwise",
    "model.decoder.layers.*.self_attn.v_proj": "colwise",
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
    "lm_head": "colwise_gather_output",
}
_BLOOM: Plan = {
    "transformer.word_embeddings": "embedding_rowwise",
    "transformer.h.*.self_attention": ("sharded:num_heads", "heads_of:alibi"),
    "transformer.h.*.self_attention.query_key_value": "colwise",
    "transformer.h.*.self_attention.dense": "rowwise",
    "transformer.h.*.mlp.dense_h_to_4h": "colwise",
    "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
    "lm_head": "colwise_gather_output",
}
_FALCON = {
    "transformer.word_embeddings": "embedding_rowwise",
    "transformer.h.*.self_attention": "sharded:num_heads,num_kv_heads",
    "transformer.h.*.self_attention.query_key_value": "colwise",
    "transformer.h.*.self_attention.dense": "rowwise",
    "transformer.h.*.mlp.dense_h_to_4h": "colwise",
    "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
    "lm_head": "colwise_gather_output",
}
_GPTJ = {
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn": "sharded:num_attention_heads",
    "transformer.h.*.attn.q_proj": "colwise",
    "transformer.h.*.attn.k_proj": "colwise",
    "transformer.h.*.attn.v_proj": "colwise",
    "transformer.h.*.attn.out_proj": "rowwise",
    "transformer.h.*.mlp.fc_in": "colwise",
    "transformer.h.*.mlp.fc_out": "rowwise",
    "lm_head": "colwise_gather_output",
}
_BERT = {
    "bert.embeddings.word_embeddings": "embedding_rowwise",
    "bert.encoder.layer.*.attention.self": "sharded:num_attention_heads,all_head_size",
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
    "cls.predictions.decoder": "colwise_gather_output",
}
_T5_LAYERS = {
    f"{stack}.block.*.layer.*.{part}": style
    for stack in ("encoder", "decoder")
    for attention in ("SelfAttention", "EncDecAttention")
    for part, style in {
        attention: "sharded:n_heads,inner_dim",
        f"{attention}.q": "colwise",
        f"{attention}.k": "colwise",
        f"{attention}.v": "colwise",
        f"{attention}.o": "rowwise",
        f"{attention}.relative_attention_bias": "heads",
        "DenseReluDense.wi": "colwise",
        "DenseReluDense.wi_0": "colwise",
        "DenseReluDense.wi_1": "colwise",
        "DenseReluDense.wo": "rowwise",
    }.items()
}
_T5 = {
    "shared": "embedding_rowwise",
    "encoder.embed_tokens": "embedding_rowwise",
    "decoder.embed_tokens": "embedding_rowwise",
    **_T5_LAYERS,
    "lm_head": "colwise_gather_output",
}
_VIT = {
    "vit.layers.*.attention": "sharded:num_attention_heads",
    "vit.layers.*.attention.q_proj": "colwise",
    "vit.layers.*.attention.k_proj": "colwise",
    "vit.layers.*.attention.v_proj": "colwise",
    "vit.layers.*.attention.o_proj": "rowwise",
    "vit.layers.*.mlp.fc1": "colwise",
    "vit.layers.*.mlp.fc2": "rowwise",
}
_OURS: dict[str, Plan] = {
    "bert": _BERT,
    "bloom": _BLOOM,
    "falcon": _FALCON,
    "gpt2": _GPT2,
    "gptj": _GPTJ,
    "opt": _OPT,
    "t5": _T5,
    "vit": _VIT,
}
"""Castor's own plans, by model_type of the configuration."""
_OWN_PLAN = "give HybridParallelPlugin(tp_plan={**model.tp_plan, ...})"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_NORMS = ("q_norm", "k_norm")
"""Names of the norms of queries and keys, which see shards if they are as wide as a head."""
_KEY_HEADS = "num_key_value_heads"
_HEADS = ("num_attention_heads", _KEY_HEADS)
_GROUPS = "num_key_value_groups"
"""Name of the number of query heads per key-value head in transformers' attention modules."""
_ALL_HEADS = ("qkv_proj", "k_proj")
"""Layers whose outputs a plan may gather, so that heads are not sharded."""
_FALCON_LAYER = "query_key_value"
"""Falcon's fused layer: groups of query heads, each followed by a key and a value head."""


def find_plan(model: nn.Module, size: int, given: Plan | None) -> dict[str, tuple[str, ...]]:
    """Returns the styles of a model, by name of the module or parameter.

    Args:
        model: The full model.
        size: Number of tensor-parallel ranks.
        given: The user's plan; None: castor's own, or else transformers'.

    Raises:
        UsageError: Heads cannot be divided evenly, or the user's plan names a module or parameter
            that the model lacks.
        NotImplementedError: There is no plan for this model, or the plan leaves a parameter
            beside sharded layers open.
    """
    config: Any = getattr(model, "config", None)
    plan = given if given is not None else _own_plan(model, config)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    of_pattern: dict[str, list[str]] = {}
    for name in names:
        of_pattern.setdefault(_NUMBER.sub("*", name), []).append(name)
        of_pattern.setdefault(name, []).append(name)
    found: dict[str, tuple[str, ...]] = {}
    for pattern, styles in plan.items():
        matching = of_pattern.get(pattern, [])
        if given is not None and not matching:
            raise UsageError(
                f"tp_plan names '{pattern}', and this {type(model).__name__} has no such module or "
                "parameter; numbers of layers are written *"
            )
        for name in matching:
            found[name] = (styles,) if isinstance(styles, str) else tuple(styles)
    if not found:
        raise NotImplementedError(_no_plan(model))
    if given is None:
        _complete(model, found, size)
    counted = _share_heads(model, found, size)
    for attribute in _HEADS:
        heads = getattr(config, attribute, None)
        if counted and attribute == _KEY_HEADS:
            continue
        if given is None and isinstance(heads, int) and heads % size:
            raise UsageError(
                f"{heads} {attribute} of this {type(model).__name__} cannot be sharded over "
                f"tp_size={size} ranks; give a tp_size that divides them"
            )
    return found


def _share_heads(model: nn.Module, plan: dict[str, tuple[str, ...]], size: int) -> bool:
    """Has several ranks share a key-value head where there are fewer heads than ranks.

    Args:
        model: The full model.
        plan: Its styles by name, which are changed.
        size: Number of tensor-parallel ranks.

    Returns:
        Whether the key-value heads were found. If so, the number of key-value heads in the
        configuration need not be a multiple of `size`.
    """
    found = False
    modules = dict(model.named_modules())
    for name, attention in modules.items():
        fused = f"{name}.{_FALCON_LAYER}"
        if hasattr(attention, "new_decoder_architecture") and plan.get(fused) == ("colwise",):
            queries, heads = attention.num_heads, attention.num_kv_heads
            found = True
            if not isinstance(queries, int) or not isinstance(heads, int) or heads == queries:
                continue
            if copies := _copies_of(heads, size, fused):
                rows = 2 * int(attention.head_dim)
                plan[fused] = (f"colwise_shared:{copies},{rows}",)
                plan[name] = ("sharded:num_heads", "set:num_kv_heads=1")
            continue
        groups, width = (getattr(attention, of, None) for of in (_GROUPS, "head_dim"))
        layers = [f"{name}.{part}" for part in ("k_proj", "v_proj")]
        layers = [layer for layer in layers if plan.get(layer) == ("colwise",)]
        if not isinstance(groups, int) or not isinstance(width, int) or not layers:
            kinds = {style for part in _ALL_HEADS for style in plan.get(f"{name}.{part}", ())}
            found = found or not kinds.isdisjoint(GATHERED_COLUMNS)
            continue
        found = True
        for layer in layers:
            outputs = int(getattr(modules[layer], "out_features", 0))
            heads = outputs // width
            if heads and (copies := _copies_of(heads, size, layer)):
                if groups % copies:
                    raise UsageError(
                        f"{groups * heads} attention heads of '{name}' cannot be sharded over "
                        f"tp_size={size} ranks; give a tp_size that divides them"
                    )
                plan[layer] = (f"colwise_shared:{copies},{outputs // heads}",)
                plan[name] = (f"set:{_GROUPS}={groups // copies}",)
    return found


def _copies_of(heads: int, size: int, name: str) -> int:
    """Returns the number of ranks that share each key-value head; 0: heads are not shared."""
    if heads % size == 0:
        return 0
    if size % heads == 0:
        return size // heads
    raise UsageError(
        f"'{name}' has {heads} key-value heads, which tp_size={size} ranks can neither shard nor "
        f"share evenly; give a tp_size that divides {heads} or is a multiple of it"
    )


def _complete(model: nn.Module, plan: dict[str, tuple[str, ...]], size: int) -> None:
    """Adds modules that transformers' plans leave out: activations and norms that see shards."""
    kinds = kinds_of(plan)
    around = dict.fromkeys(name.rpartition(".")[0] for name, of in kinds.items() if of & COLUMNS)
    for name in around:
        module = model.get_submodule(name)
        for part, child in module.named_children():
            sizes = {param.numel() for param in child.parameters()}
            activates = sizes and type(child).__module__ == "transformers.activations"
            if activates or (part in _NORMS and sizes == {getattr(module, "head_dim", None)}):
                plan.setdefault(f"{name}.{part}", ("replicated_with_grad_allreduce",))
        own = dict(module.named_parameters(recurse=False))
        for part, param in own.items():
            if f"{name}.{part}" not in plan and param.numel() > 1:
                raise NotImplementedError(
                    f"'{name}.{part}' is a parameter beside layers that tp_size={size} ranks "
                    f"shard, and the plan of this {type(model).__name__} does not say what of it "
                    f"a rank has: {_OWN_PLAN} in which it is 'colwise' (a shard) or "
                    "'replicated_with_grad_allreduce' (all of it)"
                )
        _check_kinds(name, {part: p for part, p in own.items() if p.ndim > 1}, kinds)


def _check_kinds(name: str, own: Mapping[str, nn.Parameter], kinds: Kinds) -> None:
    """Raises NotImplementedError for experts' packed matrices (gate_up_proj) that are 'colwise'."""
    rows = [part for part in own if "rowwise" in kinds.get(f"{name}.{part}", ())]
    for part, param in own.items():
        if "colwise" not in kinds.get(f"{name}.{part}", ()) or not rows:
            continue
        outputs, inputs = param.shape[-2], own[rows[0]].shape[-1]
        if outputs != inputs:
            raise NotImplementedError(
                f"the plan shards '{name}.{part}' by 'colwise', and it has {outputs} outputs where "
                f"'{rows[0]}' takes {inputs}: of kinds that lie one behind the other each rank "
                f"would have another: {_OWN_PLAN} in which it is 'packed_colwise', if there are two"
            )


def with_expert_parallel(
    model: nn.Module, plan: Mapping[str, tuple[str, ...]], size: int
) -> dict[str, tuple[str, ...]]:
    """Returns the plan with expert parallelism: each rank has some of the experts, in full.

    Args:
        model: The full model.
        plan: Styles of its layers; empty: layers are full, and each rank has other data.
        size: Number of expert-parallel ranks.

    Raises:
        UsageError: The model has no module of experts, or fewer experts than `size`.
    """
    modules = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
    ]
    if not modules:
        raise UsageError(
            f"ep_size={size} shards experts, and this {type(model).__name__} has no module of "
            "that name; leave it out"
        )
    for name, module in modules:
        count = getattr(module, "num_experts", size)
        if count < size:
            raise UsageError(f"'{name}' has {count} experts, too few for ep_size={size} ranks")
    beneath = tuple(f"{name}." for name, _ in modules)
    others = {name: styles for name, styles in plan.items() if not name.startswith(beneath)}
    style = "whole_experts" if plan else "exchanged_experts"
    return others | {name: (style,) for name, _ in modules}


def _own_plan(model: nn.Module, config: Any) -> Plan:
    if getattr(config, "model_type", "") == "falcon" and config.alibi:
        raise NotImplementedError(
            f"this {type(model).__name__} has ALiBi in its attention masks, whose heads castor "
            "cannot shard: give tp_size=1"
        )
    ours = _OURS.get(str(getattr(config, "model_type", "")))
    if ours is not None:
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        if getattr(model, "base_model", None) is not model:
            return ours
        return {name.removeprefix(prefix): style for name, style in ours.items()}
    theirs: Any = getattr(model, "tp_plan", None)
    if isinstance(theirs, Mapping) and theirs:
        return {str(name): str(style) for name, style in theirs.items()}
    raise NotImplementedError(_no_plan(model))


def _no_plan(model: nn.Module) -> str:
    return (
        f"castor cannot shard a {type(model).__name__} over ranks, and transformers has no "
        f"tp_plan for it. Castor's own: {', '.join(sorted(_OURS))}. Give "
        "HybridParallelPlugin(tp_plan={...}): names of modules, with * for numbers, and a style: "
        "'colwise' for the layers behind which heads or hidden units are sharded, 'rowwise' for "
        "those that take them, 'embedding_rowwise', 'colwise_gather_output' for the output "
        "embedding, 'sharded:num_heads' for attributes that count heads"
    )
