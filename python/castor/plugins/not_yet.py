"""Arguments that GeminiPlugin knows and cannot honour yet."""

from __future__ import annotations

import inspect
from typing import Any

from castor.config import did_you_mean

# Arguments of Colossal-AI's GeminiPlugin that this version knows but cannot honour, each with the
# value that asks for nothing, and what to do instead.
NOT_YET: dict[str, tuple[object, str]] = {
    "chunk_config_dict": (None, "give chunk_bytes"),
    "chunk_init_device": (None, "chunks are built on the host"),
    "master_weights": (True, "16-bit precisions always keep fp32 master weights"),
    "force_outputs_fp32": (False, "cast the outputs in the training loop"),
    "strict_ddp_mode": (False, "every rank has all gradients"),
    "search_range_m": (None, "give chunk_bytes"),
    "hidden_dim": (None, "give chunk_bytes"),
    "min_chunk_size_m": (None, "give chunk_bytes"),
    "memstats": (None, "give trace_file"),
    "tp_size": (1, "use HybridParallelPlugin"),
    "pp_size": (1, "use HybridParallelPlugin"),
    "ep_size": (1, "use HybridParallelPlugin"),
    "sp_size": (1, "use HybridParallelPlugin"),
    "num_microbatches": (None, "use HybridParallelPlugin(pp_size=...)"),
    "microbatch_size": (None, "use HybridParallelPlugin(pp_size=...)"),
    "enable_all_optimization": (False, "turn it on in the model"),
    "enable_fused_normalization": (False, "turn it on in the model"),
    "enable_flash_attention": (False, "use the model's attn_implementation"),
    "enable_jit_fused": (False, "turn it on in the model"),
    "enable_sequence_parallelism": (False, "every rank has full sequences"),
    "enable_async_reduce": (False, "gradients are exchanged when backward is over"),
    "use_fp8": (False, "use bf16"),
    "fp8_communication": (False, "gradients are sent in the working precision"),
    "nvme_dir": (None, "give nvme_path"),
}


def arguments_of(plugin: type) -> frozenset[str]:
    """Returns the names of the arguments that a plugin and its base classes take and honour."""
    return frozenset(
        one.name
        for kind in plugin.__mro__
        if kind is not object
        for one in inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
        if one.kind is one.KEYWORD_ONLY
    )


def check_not_yet(plugin: type, arguments: dict[str, Any]) -> None:
    """Checks arguments that a plugin accepts only at the value that asks for nothing.

    Raises:
        TypeError: There is no such argument.
        NotImplementedError: An argument has another value.
    """
    for name, value in arguments.items():
        if name not in NOT_YET:
            known = did_you_mean(name, arguments_of(plugin) | NOT_YET.keys())
            raise TypeError(f"{plugin.__name__} has no argument {name!r}{known}")
        neutral, instead = NOT_YET[name]
        if value != neutral:
            raise NotImplementedError(f"{name}={value!r} is not supported yet: {instead}")
