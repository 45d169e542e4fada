"""Training steps on a GPU, each contender in a process of its own: part of benchmarks/gpu.py.

All keep parameters and gradients in bf16, masters and both moments in fp32 (12 bytes a parameter),
with the same weight decay and clipping, and fetch two layers ahead, where they stream. What has a
narrower state says so in its name.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

LR, WEIGHT_DECAY, MAX_NORM, SEQUENCE, VOCAB = 1e-4, 0.01, 1.0, 1024, 8192
PREFETCH = 2
TOKENS = (4096, 16384, 65536)
"""Of a step, where the command does not say others."""
WARMUP_STEPS = 4  # castor traces the first, places chunks after the second
LOSS_TOLERANCE = 0.02
"""Relative, of each loss against the resident model's: they add in other orders, in bf16."""
DEVICE = "cuda"


@dataclass(frozen=True, kw_only=True)
class Load:
    """One model and one size of step."""

    width: int
    layers: int
    tokens: int
    """Of a step, a multiple of SEQUENCE."""
    steps: int
    """That are timed."""
    device_memory: int | None = None
    """Bytes, of castor_at_zero2s_peak alone; None: as castor_auto."""

    @property
    def parameters(self) -> int:
        """Of the model, biases and norms left out."""
        return 12 * self.layers * self.width**2 + (VOCAB + SEQUENCE) * self.width

    def build(self) -> Any:
        """A GPT-2 on the CPU, in float32, that recomputes its layers in backward.

        Its weights are drawn on the GPU, which takes no time, and are the same for all.
        """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=self.width, n_layer=self.layers, n_head=self.width // 128,
            n_positions=SEQUENCE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        config.loss_type = "ForCausalLM"
        with torch.device(DEVICE):
            model = GPT2LMHeadModel(config).train()
        model.to("cpu")
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        old_name = model.gradient_checkpointing_enable  # deprecated in later transformers
        getattr(model, "activation_checkpointing_enable", old_name)({"use_reentrant": False})
        return model

    def batch(self, step: int) -> dict[str, Any]:
        """Random tokens on the GPU."""
        import torch

        generator = torch.Generator().manual_seed(1000 + step)
        shape = (self.tokens // SEQUENCE, SEQUENCE)
        ids = torch.randint(VOCAB, shape, generator=generator).to(DEVICE)
        return {"input_ids": ids, "labels": ids}


Step = Callable[[int], Any]
Report = Callable[[], dict[str, Any]]


def _torch_loop(load: Load, model: Any, optimizer: Any) -> Step:
    import torch

    def step(i: int) -> Any:
        loss = model(**load.batch(i)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_resident(load: Load) -> tuple[Step, Report]:
    """All on the GPU: the compute to hide copies and updates behind."""
    import torch

    model = load.build().to(DEVICE)
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(i: int) -> Any:
        params = list(model.parameters())
        loss = model(**load.batch(i)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        for master, param in zip(masters, params, strict=True):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        return loss

    return step, dict


def _make_castor(load: Load, **settings: Any) -> tuple[Step, Report]:
    import castor

    model = load.build()
    booster = castor.Booster(
        plugin=castor.GeminiPlugin(
            device=DEVICE, precision="bf16", max_norm=MAX_NORM, max_prefetch=PREFETCH, **settings
        )
    )
    optimizer = castor.HybridAdam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    model, optimizer, *_ = booster.boost(model, optimizer)

    def step(i: int) -> Any:
        loss = model(**load.batch(i)).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, lambda: vars(booster.report())


def make_castor_streamed(load: Load) -> tuple[Step, Report]:
    """Every chunk comes and goes, its update is the host's."""
    return _make_castor(load, placement_policy="cpu", optim_state_format="fp32")


def make_castor_auto(load: Load) -> tuple[Step, Report]:
    """Whole chunks stay where there is room."""
    return _make_castor(load, optim_state_format="fp32")


def make_castor_at_zero2s_peak(load: Load) -> tuple[Step, Report]:
    """As castor_auto, in no more of the GPU's memory than DeepSpeed's ZeRO-2 took at its peak."""
    return _make_castor(load, optim_state_format="fp32", device_memory=load.device_memory)


def make_castor_streamed_split_bf16(load: Load) -> tuple[Step, Report]:
    """As castor_streamed, with 6 bytes of state a parameter instead of 12."""
    return _make_castor(load, placement_policy="cpu", optim_state_format="split_bf16")


def make_fsdp2(load: Load) -> tuple[Step, Report]:
    """FSDP2 with CPUOffloadPolicy: fp32 masters on the host, cast to bf16 for the compute."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _start_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    model = load.build()
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(DEVICE, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    layers = list(model.transformer.h)
    for layer in layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + PREFETCH])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - PREFETCH) : i][::-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    return _torch_loop(load, model, optimizer), dict


def _start_process_group(backend: str) -> None:
    """Of this process alone."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _make_deepspeed(load: Load, zero: dict[str, Any]) -> tuple[Step, Report]:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = load.build()
    config = {
        "train_micro_batch_size_per_gpu": load.tokens // SEQUENCE,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "zero_optimization": {"overlap_comm": True, **zero},
    }
    optimizer = DeepSpeedCPUAdam(
        model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, adamw_mode=True
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(i: int) -> Any:
        loss = engine(**load.batch(i)).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step, dict


ON_HOST = {"device": "cpu", "pin_memory": True}


def make_deepspeed_zero2(load: Load) -> tuple[Step, Report]:
    """ZeRO-2, parameters on the GPU, the optimizer's state on the host."""
    return _make_deepspeed(load, {"stage": 2, "offload_optimizer": ON_HOST})


def make_deepspeed_zero3(load: Load) -> tuple[Step, Report]:
    """ZeRO-3, parameters and the optimizer's state on the host, two layers fetched ahead."""
    ahead = PREFETCH * 12 * load.width**2
    zero = {"stage": 3, "offload_param": ON_HOST, "stage3_prefetch_bucket_size": ahead}
    return _make_deepspeed(load, {**zero, "offload_optimizer": ON_HOST})


CONTENDERS = {
    "resident": make_resident,
    "castor_streamed": make_castor_streamed,
    "castor_auto": make_castor_auto,
    "castor_streamed_split_bf16": make_castor_streamed_split_bf16,
    "fsdp2_offload": make_fsdp2,
    "deepspeed_zero2_offload": make_deepspeed_zero2,
    "deepspeed_zero3_offload": make_deepspeed_zero3,
    "castor_at_zero2s_peak": make_castor_at_zero2s_peak,
}


def _train(name: str, load: Load) -> dict[str, Any]:
    """Seconds of each timed step, losses of all, peaks; runs in its own process."""
    import torch

    step, report = CONTENDERS[name](load)
    losses = [step(i).item() for i in range(WARMUP_STEPS)]
    before, seconds = report(), []
    for i in range(WARMUP_STEPS, WARMUP_STEPS + load.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(i)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    after = report()
    moved = {
        key: (after[key] - before[key]) / load.steps
        for key in ("h2d_bytes", "d2h_bytes", "demand_fetches")
        if key in after
    }
    peak = torch.cuda.max_memory_reserved()
    found = {"seconds": seconds, "losses": losses, "peak_bytes": peak, "of_a_step": moved}
    if "peak_device_bytes" in after:
        found["peak_device_bytes"] = after["peak_device_bytes"]
    return found


def train(name: str, load: Load) -> dict[str, Any]:
    """What _train gives with tokens_per_second.

    Or {"missing": package}, or {"error": what went wrong}.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            found = pool.submit(_train, name, load).result()
        except ModuleNotFoundError as error:
            return {"missing": error.name}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    found["median_seconds"] = sorted(found["seconds"])[load.steps // 2]
    found["tokens_per_second"] = load.tokens / found["median_seconds"]
    return found


def compare(found: dict[str, dict[str, Any]]) -> None:
    """Adds to the contenders of one size of step how they stand to the resident one.

    fraction_of_compute is the resident step's time over its own, loss_difference the largest
    relative difference of a loss; an error where that is beyond LOSS_TOLERANCE.
    """
    resident = found.get("resident", {"error": "not run"})
    for name, one in found.items():
        if "seconds" not in one or "seconds" not in resident:
            continue
        one["fraction_of_compute"] = resident["median_seconds"] / one["median_seconds"]
        pairs = zip(one["losses"], resident["losses"], strict=True)
        one["loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
        if not one["loss_difference"] <= LOSS_TOLERANCE:
            one["error"] = (
                f"the losses of {name} are up to {one['loss_difference']:.1%} from the resident "
                f"model's, beyond {LOSS_TOLERANCE:.0%}"
            )
