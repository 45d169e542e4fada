"""Compares castor's types of parameters and buffers with transformers' own, family by family.

`python tests/python/types_of_families.py [PATTERN]` builds every causal language model of the
installed transformers from a small config, in float32, and asks for each 16-bit precision which
types castor would give its tensors. `from_pretrained(dtype=...)` of the same model has to give the
same. A model that is loaded in that type has to stay as it is. Exits 1 where a type differs.
"""

import contextlib
import fnmatch
import io
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf
from torch import nn

from castor.runtime.tensor_types import tensor_types

SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "d_embed"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "text_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "mamba_d_head", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
}
MOST_PARAMETERS = 20_000_000


def small(config: Any) -> Any:
    """A config of the same class with small sizes, and so those in it."""
    sizes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, hf.PreTrainedConfig):
            sizes[name] = small(value).to_dict()
    for name, size in SIZES.items():
        known = name in vars(config) or name in config.attribute_map
        value = getattr(config, name) if known else None
        if isinstance(value, int) and not isinstance(value, bool):
            sizes[name] = min(value, size)
    return type(config)(**sizes)


def families(pattern: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, config class, model class) of causal language models."""
    mapping = hf.AutoModelForCausalLM._model_mapping
    names = {config: name for name, config in hf.CONFIG_MAPPING.items()}
    for config in mapping:
        name = names.get(config, config.__name__)
        if fnmatch.fnmatch(name, pattern):
            found = mapping[config]
            yield name, config, found[0] if isinstance(found, tuple) else found


def types(model: nn.Module) -> dict[str, torch.dtype]:
    """The type of each floating-point tensor."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.dtype for name, tensor in named if tensor.is_floating_point()}


def compare(model: Any, dtype: torch.dtype) -> list[str]:
    """What differs."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        loaded = type(model).from_pretrained(directory, dtype=dtype)
    theirs = types(loaded)
    wrong = []
    for what, of in (("built", model), ("loaded", loaded)):
        chosen = tensor_types(of, dtype).tensors
        wrong += [
            f"{what}, {dtype}: {name} is {chosen.get(name)} and theirs {their}"
            for name, their in theirs.items()
            if chosen.get(name) != their
        ]
    return wrong


def check(config_class: Any, model_class: Any) -> tuple[str, list[str]]:
    """(verdict, what differs)."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            config = small(config_class())
            config.validate()
            with torch.device("meta"):
                elements = sum(p.numel() for p in model_class(config).parameters())
            if elements > MOST_PARAMETERS:
                return f"not small: {elements} parameters", []
            model = model_class(config)
            with tempfile.TemporaryDirectory() as directory:
                model.save_pretrained(directory)
                type(model).from_pretrained(directory)
        except Exception as error:
            return f"not built or loaded: {type(error).__name__}: {str(error)[:80]}", []
        wrong = [
            line for dtype in (torch.bfloat16, torch.float16) for line in compare(model, dtype)
        ]
    islands = sum(dtype == torch.float32 for dtype in types(model).values())
    return "differs" if wrong else f"equal, {islands} tensors", wrong


def main() -> int:
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    pattern = sys.argv[1] if len(sys.argv) > 1 else "*"
    counts = {"equal": 0, "differs": 0, "not": 0, "failed": 0}
    for name, config_class, model_class in families(pattern):
        try:
            verdict, wrong = check(config_class, model_class)
        except Exception:
            verdict, wrong = "failed", [traceback.format_exc(limit=-3)]
        counts[next(key for key in counts if verdict.startswith(key))] += 1
        print(f"{name}: {verdict}", *wrong[:4], sep="\n    ", flush=True)
    print(counts)
    return int(counts["differs"] + counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
