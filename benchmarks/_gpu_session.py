"""Training steps on a GPU, each contender in a process of its own: part of benchmarks/gpu.py."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

LR, MAX_NORM, SEQUENCE, VOCAB = 1e-4, 1.0, 1024, 8192
WARMUP_STEPS = 4  # castor traces the first, places chunks after the second


@dataclass(frozen=True, kw_only=True)
class Load:
    """One model and one size of step."""

    width: int
    layers: int
    tokens: int
    """Of a step, a multiple of SEQUENCE."""
    steps: int
    """That are timed."""

    def build(self) -> Any:
        """A GPT-2 on the CPU, in float32, that recomputes its layers in backward."""
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=self.width, n_layer=self.layers, n_head=self.width // 128,
            n_positions=SEQUENCE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(config).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def batch(self, step: int) -> dict[str, Any]:
        """Random tokens on the GPU."""
        import torch

        generator = torch.Generator().manual_seed(1000 + step)
        shape = (self.tokens // SEQUENCE, SEQUENCE)
        ids = torch.randint(VOCAB, shape, generator=generator).cuda()
        return {"input_ids": ids, "labels": ids}


Step = Callable[[int], Any]


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


def make_resident(load: Load) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """All on the GPU, bf16 without masters: the compute to hide copies and updates behind."""
    import torch

    model = load.build().to(device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return _torch_loop(load, model, optimizer), dict


def _make_castor(load: Load, **settings: Any) -> tuple[Step, Callable[[], dict[str, Any]]]:
    import castor

    model = load.build()
    booster = castor.Booster(
        plugin=castor.GeminiPlugin(
            device="cuda", precision="bf16", max_norm=MAX_NORM, max_prefetch=2, **settings
        )
    )
    model, optimizer, *_ = booster.boost(model, castor.HybridAdam(model.parameters(), lr=LR))

    def step(i: int) -> Any:
        loss = model(**load.batch(i)).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, lambda: vars(booster.report())


def make_castor_streamed(load: Load) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """Every chunk comes and goes, its update is the host's."""
    return _make_castor(load, placement_policy="cpu", optim_state_format="split_bf16")


def make_castor_auto(load: Load) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """Whole chunks stay where there is room."""
    return _make_castor(load, optim_state_format="split_bf16")


def make_deepspeed(load: Load) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """ZeRO-3, parameters and optimizer offloaded to pinned memory."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = load.build()
    on_host = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": load.tokens // SEQUENCE,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_param": on_host,
            "offload_optimizer": on_host,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=LR), config=config
    )

    def step(i: int) -> Any:
        loss = engine(**load.batch(i)).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step, dict


CONTENDERS = {
    "resident": make_resident,
    "castor_streamed": make_castor_streamed,
    "castor_auto": make_castor_auto,
    "deepspeed_zero3_offload": make_deepspeed,
}


def _train(name: str, load: Load) -> dict[str, Any]:
    """Seconds of each timed step, losses, peaks; runs in its own process."""
    import torch

    step, report = CONTENDERS[name](load)
    for i in range(WARMUP_STEPS):
        step(i)
    before, seconds, losses = report(), [], []
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
    return {"seconds": seconds, "losses": losses, "peak_bytes": peak, "of_a_step": moved}


def train(name: str, load: Load) -> dict[str, Any]:
    """What _train gives, or {"error": why not}: a package that is missing, memory that ended."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            return pool.submit(_train, name, load).result()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def session(width: int, layers: int, steps: int, tokens: list[int]) -> dict[str, Any]:
    """Every contender at every number of tokens a step.

    Returns:
        "parameters", and by tokens and contender what train gives with tokens_per_second, and
        fraction_of_compute: the resident step over its own.
    """
    result: dict[str, Any] = {"parameters": 12 * layers * width**2 + (VOCAB + SEQUENCE) * width}
    for count in tokens:
        load = Load(width=width, layers=layers, tokens=count, steps=steps)
        found = {name: train(name, load) for name in CONTENDERS}
        for one in found.values():
            if "error" not in one:
                one["median_seconds"] = sorted(one["seconds"])[steps // 2]
                one["tokens_per_second"] = count / one["median_seconds"]
                if "error" not in found["resident"]:
                    resident = sorted(found["resident"]["seconds"])[steps // 2]
                    one["fraction_of_compute"] = resident / one["median_seconds"]
        result[str(count)] = found
    return result
