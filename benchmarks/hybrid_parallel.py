# Question: what does a step cost with tensor parallelism on two ranks, with room for the full shard
#     and inside a budget it does not fit, beside transformers' and torch's own tensor parallelism?
# Baseline: transformers' tp_plan applied by transformers (DTensor); torch's parallelize_module with
#     the same styles; plain PyTorch in one process with as many threads. All over gloo, processes
#     of this machine, AdamW, no clipping (clip_grad_norm_ takes no mixture of DTensors and others).
# Model: a Llama of 44M parameters (12 layers, 512 wide, 8 heads, vocabulary 8192), fp32, 4 x 128
#     tokens, one thread a rank, the same seed and batches everywhere. tight(x) is the non-model
#     peak of the ample run and x * the bytes of a rank's part.
# Method: zero.py's.
"""A step with tensor parallelism beside its peers: `python benchmarks/hybrid_parallel.py`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from _machine import command_line, describe_machine, write_record
from _ranks import Ranks, measure
from _steps import HEAD_WIDTH, LR, QUICK, VOCAB, Model, Report, Step, tight
from rich.console import Console

TIGHT_SHARE = 0.5
BARS = {  # ratio of times to the largest that meets the target
    "castor ample / transformers": 1.0,
    "castor tight / transformers": None,
    "castor ample / torch": None,
    "castor tight / torch": None,
    "castor, tokens too / castor ample": None,
    "castor ample / plain": None,
    "castor tight / plain": None,
}


def build(model: Model) -> Any:
    """A Llama of that shape; the same weights at every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=model.width, intermediate_size=11 * model.width // 4,
        num_hidden_layers=model.layers, num_attention_heads=model.width // HEAD_WIDTH,
        num_key_value_heads=model.width // HEAD_WIDTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def _step(model: Model, module: Any, optimizer: Any) -> Step:
    """Forward, backward and update of a whole batch."""

    def step(i: int) -> float:
        loss = module(**model.batch(i)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def make_plain(_: int, model: Model) -> tuple[Step, Report]:
    """One process, a thread for each rank of the others."""
    import torch

    torch.set_num_threads(2)
    module = build(model)
    return _step(model, module, torch.optim.AdamW(module.parameters(), lr=LR, fused=True)), dict


def make_transformers(_: int, model: Model) -> tuple[Step, Report]:
    """Transformers' own, over DTensor."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    module = build(model)
    settings = DistributedConfig(tp_size=size, tp_plan="auto")
    plan, *_rest = module._resolve_parallel_plans(settings)
    apply_tensor_parallelism(module, mesh, plan)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, foreach=False)
    return _step(model, module, optimizer), dict


def make_torch(_: int, model: Model) -> tuple[Step, Report]:
    """Torch's parallelize_module."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    module = build(model)
    columns, rows = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
    for layer in module.model.layers:
        plan = {f"self_attn.{name}": ColwiseParallel() for name in columns}
        plan |= {f"self_attn.{name}": RowwiseParallel() for name in rows}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        parallelize_module(layer, mesh, plan | {"mlp.down_proj": RowwiseParallel()})
    whole = Replicate()
    top = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole),
        "lm_head": ColwiseParallel(output_layouts=whole),
    }
    parallelize_module(module, mesh, top)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, foreach=False)
    return _step(model, module, optimizer), dict


def make_castor(
    _: int,
    model: Model,
    device_memory: int | None,
    mode: str = "all_to_all",
    divided: str = "tp_size",
) -> tuple[Step, Report]:
    """With castor, in a device budget of bytes (None: room for everything).

    All ranks divide layers, or what else `divided` names.
    """
    import torch
    from torch import distributed

    from castor import Booster, HybridParallelPlugin

    module = build(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    plugin = HybridParallelPlugin(
        **{divided: distributed.get_world_size()}, device="cpu", precision="fp32",
        device_memory=device_memory or "3GiB", host_memory="3GiB", sequence_parallelism_mode=mode,
    )  # fmt: skip
    booster = Booster(plugin)
    booster.boost(module, optimizer)
    param_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return _step(
        model, module, optimizer
    ), lambda: vars(booster.report()) | {"param_bytes": param_bytes}


def main() -> int:
    parser = command_line("hybrid_parallel", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    arguments = parser.parse_args()
    console = Console(width=110)
    machine = describe_machine()

    size = arguments.ranks
    model = replace(QUICK, width=2 * HEAD_WIDTH) if arguments.quick else Model()
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    found = {
        "plain": Ranks.start("plain PyTorch, one process", 1, make_plain, model),
        "transformers": Ranks.start(
            "transformers' tp_plan (DTensor)", size, make_transformers, model
        ),
        "torch": Ranks.start("torch's parallelize_module", size, make_torch, model),
        "castor ample": Ranks.start("castor, ample budget", size, make_castor, model, None),
        "castor, tokens too": Ranks.start(
            "castor, tokens between layers divided", size, make_castor, model, None, "split_gather"
        ),
    }
    budget = tight(found["castor ample"].report()[0], TIGHT_SHARE)
    name = f"castor, tight({TIGHT_SHARE}) = {budget / 2**20:.0f} MiB a rank"
    found["castor tight"] = Ranks.start(name, size, make_castor, model, budget)
    title = f"Llama, {size} ranks divide each layer, {model.rows} x {model.sequence} tokens"
    figures = {"ranks": size} | measure(
        found, rounds, steps, bars=BARS, reference="plain", title=title, console=console
    )
    write_record(arguments, "hybrid_parallel", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
