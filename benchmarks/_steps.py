"""What the step benchmarks train: one model, the peers that train it, and a process for each."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from _memory import memory_now

VOCAB, POSITIONS, HEAD_WIDTH = 8192, 1024, 64
LR, MAX_NORM, SEED = 3e-4, 1.0, 0
WARMUP_STEPS = 3  # castor and DeepSpeed trace the first step and plan from it
# Relative, of each of the first losses against plain PyTorch's: its clip_grad_norm_ sums 4M squares
# in fp32 and finds a norm 2e-5 too small here, which castor does not reproduce. From there on the
# two runs part by chaos, the tokens being random; tests/python/test_parity.py follows them further.
TOLERANCE, COMPARED_STEPS = 1e-4, 12

Step = Callable[[int], float]
Report = Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT-2 and its batches; 12 layers of 512 are 42.5M parameters."""

    layers: int = 12
    width: int = 512
    """A multiple of HEAD_WIDTH."""
    rows: int = 4
    sequence: int = 128
    checkpointing: bool = False
    """Recompute each layer in backward: what is saved of a layer is then its input."""

    def build(self) -> Any:
        """The module; the same weights at every call."""
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(SEED)
        config = GPT2Config(
            vocab_size=VOCAB,
            n_positions=POSITIONS,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.width // HEAD_WIDTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        config.loss_type = "ForCausalLM"
        model = GPT2LMHeadModel(config).train()
        if self.checkpointing:
            old_name = model.gradient_checkpointing_enable  # deprecated in later transformers
            getattr(model, "activation_checkpointing_enable", old_name)({"use_reentrant": False})
        return model

    def batch(self, step: int) -> dict[str, Any]:
        """Random tokens; other ones for each step."""
        import torch

        generator = torch.Generator().manual_seed(1000 + step)
        ids = torch.randint(VOCAB, (self.rows, self.sequence), generator=generator)
        return {"input_ids": ids, "labels": ids}

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.sequence

    @property
    def num_params(self) -> int:
        """Parameters, tied ones once."""
        of_layer = 12 * self.width**2 + 13 * self.width
        return self.layers * of_layer + (VOCAB + POSITIONS + 2) * self.width

    @property
    def title(self) -> str:
        """Size and batch, for tables."""
        return f"GPT-2 {self.num_params / 1e6:.1f}M, {self.rows} x {self.sequence} tokens"


QUICK = Model(layers=2, width=64, rows=1, sequence=32)
"""What --quick trains."""


def make_plain(model: Model) -> tuple[Step, Report]:
    """Plain PyTorch: AdamW(fused=True), clip_grad_norm_."""
    return torch_step(model.build(), model.batch), dict


def torch_step(module: Any, batch_of: Callable[[int], dict[str, Any]]) -> Step:
    """A step of AdamW(fused=True) and clip_grad_norm_ over a module, wrapped or not."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)

    def step(i: int) -> float:
        loss = module(**batch_of(i)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def make_compute(model: Model) -> tuple[Step, Report]:
    """Plain PyTorch's forward and backward alone: nothing is updated."""
    module = model.build()

    def step(i: int) -> float:
        loss = module(**model.batch(i)).loss
        loss.backward()
        module.zero_grad()
        return loss.item()

    return step, dict


def make_castor(
    model: Model, device_memory: int | None, settings: dict[str, Any] | None = None
) -> tuple[Step, Report]:
    """With castor, in a device budget of bytes (None: room for everything) and further settings.

    The host has room for everything, too: its own budget would be what the device's leaves of this
    machine's memory. Its report also has "update_seconds": the time of each optimizer.step().
    """
    import torch

    from castor import Booster, GeminiPlugin

    module = model.build()
    param_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    host_memory = 5 * param_bytes + (64 << 20)  # values, gradients, two states; and some
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    plugin = GeminiPlugin(
        device="cpu",
        device_memory=device_memory or "1TiB",
        precision="fp32",
        **({"max_norm": MAX_NORM, "host_memory": host_memory} | (settings or {})),
    )
    booster = Booster(plugin=plugin)
    module, optimizer, *_ = booster.boost(module, optimizer)
    update_seconds: list[float] = []

    def step(i: int) -> float:
        loss = module(**model.batch(i)).loss
        booster.backward(loss, optimizer)
        start = time.perf_counter()
        optimizer.step()
        update_seconds.append(time.perf_counter() - start)
        optimizer.zero_grad()
        return loss.item()

    def report() -> dict[str, Any]:
        figures = vars(booster.report())
        return {**figures, "param_bytes": param_bytes, "update_seconds": update_seconds}

    return step, report


def make_deepspeed(
    model: Model, stage: int, settings: dict[str, Any] | None = None
) -> tuple[Step, Report]:
    """DeepSpeed ZeRO with its own CPU Adam; parameters are offloaded too in stage 3.

    Args:
        model: What is trained.
        stage: 2 or 3.
        settings: Of "zero_optimization", beside the stage and what is offloaded.
    """
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    engine = start_deepspeed(model, {"zero_optimization": zero | (settings or {})})

    def step(i: int) -> float:
        loss = engine(**model.batch(i)).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, dict


def start_deepspeed(model: Model, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine over the model, on the CPU and in this process, with its own CPU Adam.

    Args:
        model: What is trained.
        config: Of deepspeed.initialize; batch size and clipping are added.
    """
    # One process: what torchrun would set, and a store that needs no port.
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1"
    )
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    _start_process_group()
    deepspeed.init_distributed(dist_backend="gloo")
    module = model.build()
    optimizer = DeepSpeedCPUAdam(module.parameters(), lr=LR, weight_decay=1e-2, adamw_mode=True)
    fixed = {"train_micro_batch_size_per_gpu": model.rows, "gradient_clipping": MAX_NORM}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=fixed | config)
    return engine


def make_fsdp2(model: Model) -> tuple[Step, Report]:
    """FSDP2 with CPUOffloadPolicy: each layer and the rest are sharded over one gloo process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _start_process_group()
    module = model.build()
    mesh = init_device_mesh("cpu", (1,))
    policy = CPUOffloadPolicy(pin_memory=False)  # nothing to pin for without a GPU
    for layer in module.transformer.h:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(module, mesh=mesh, offload_policy=policy)
    return torch_step(module, model.batch), dict


def _start_process_group() -> None:
    """Gloo with this process alone."""
    import torch

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def processes() -> Any:
    """Starts each contender's process from one that has imported torch and transformers.

    That saves seconds a process. Castor and DeepSpeed are imported by whom they belong to.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.gpt2.modeling_gpt2"])
    return context


def work(make: Callable[..., tuple[Step, Report]], arguments: tuple[Any, ...],
         pipe: Connection) -> None:  # fmt: skip
    """A contender's process: answers each (first step, count) with [(seconds, loss), ...]."""
    step, report = make(*arguments)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        if order == "report":
            pipe.send(report() | memory_now())
            continue
        done = []
        for i in range(order[0], order[0] + order[1]):
            start = time.perf_counter()
            loss = step(i)
            done.append((time.perf_counter() - start, loss))
        pipe.send(done)


@dataclass(kw_only=True)
class Contender:
    """A process and what it measured."""

    name: str
    process: Any
    pipe: Connection
    seconds: list[list[float]] = field(default_factory=list)
    """Of each round, of each step."""
    losses: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, make: Callable[..., Any], *arguments: Any) -> Contender:
        """Starts the process, waits until its model is made, and runs the untimed steps."""
        context = processes()
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(make, arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        contender = cls(name=name, process=process, pipe=mine)
        contender.receive()
        contender.run(WARMUP_STEPS, timed=False)
        return contender

    def receive(self) -> Any:
        """The process's next answer."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(
                f"{self.name}: its process ended with status {self.process.exitcode}; see above"
            ) from None

    def run(self, steps: int, *, timed: bool) -> None:
        """The next `steps` steps while every other contender sleeps."""
        self.pipe.send((len(self.losses), steps))
        done = self.receive()
        self.losses += [loss for _, loss in done]
        if timed:
            self.seconds.append([seconds for seconds, _ in done])

    def report(self) -> dict[str, Any]:
        """Memory of the process, and of castor what its report says so far."""
        self.pipe.send("report")
        found: dict[str, Any] = self.receive()
        return found

    def stop(self) -> None:
        """Lets the process end."""
        self.pipe.send(None)
        self.process.join(30)

    @property
    def medians(self) -> list[float]:
        """Of each round."""
        return [statistics.median(steps) for steps in self.seconds]


def tight(ample: dict[str, Any], share: float) -> int:
    """A device budget in bytes: the non-model peak of an ample run and a share of the parameters.

    Args:
        ample: Contender.report() of castor with room for everything.
        share: Of the parameters' bytes.
    """
    return int(ample["peak_nonmodel_bytes"] + share * ample["param_bytes"])


def run_rounds(found: Mapping[str, Any], rounds: int, steps: int) -> None:
    """Every contender runs `steps` timed steps a round; who begins changes from round to round."""
    order = list(found.values())
    for round_ in range(rounds):
        first = round_ % len(order)
        for contender in order[first:] + order[:first]:
            contender.run(steps, timed=True)


def worst_difference(losses: list[float], reference: list[float]) -> float:
    """Largest relative difference; NaN counts as infinite."""
    relative = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return max(value if value == value else float("inf") for value in relative)


def verify(found: dict[str, Contender], reports: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Every contender trained: the losses of its first steps are those of found["plain"].

    Returns:
        The largest relative difference of each.

    Raises:
        RuntimeError: Losses differ by more than TOLERANCE, or castor passed its budget.
    """
    reference = found["plain"].losses[:COMPARED_STEPS]
    differences = {
        key: worst_difference(contender.losses[:COMPARED_STEPS], reference)
        for key, contender in found.items()
    }
    for key, worst in differences.items():
        if not worst <= TOLERANCE:
            raise RuntimeError(f"{key}: losses differ from plain PyTorch's by {worst:.1e}")
    for key, report in reports.items():
        budget = report.get("device_budget_bytes")
        if budget is not None and report["peak_device_bytes"] > budget:
            raise RuntimeError(f"{key}: peak {report['peak_device_bytes']} passed {budget} bytes")
    return differences
