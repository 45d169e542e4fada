# Question: what does a step cost with context parallelism on two ranks, with room for the model
#     and inside a budget it does not fit, beside DeepSpeed's Ulysses?
# Baseline: DeepSpeed's UlyssesSPAttentionHF (ALST) in its engine, which sums gradients over the
#     ranks in one flat buffer (ZeRO stage 0: stages 1 and 2 took longer here); plain PyTorch in one
#     process with as many threads. All over gloo, processes of this machine, AdamW, no clipping.
# Model: hybrid_parallel.py's Llama of 44M parameters, fp32, 2 x 512 tokens, one thread a rank, the
#     same seed and batches everywhere. tight(x) is the non-model peak of the ample run and
#     x * parameter bytes.
# Method: zero.py's.
"""A step with context parallelism beside its peers: `python benchmarks/sequence_parallel.py`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib.util import find_spec

from _machine import command_line, describe_machine, write_record
from _ranks import Ranks, measure
from _steps import HEAD_WIDTH, LR, QUICK, Model, Report, Step, tight
from hybrid_parallel import build, make_castor, make_plain
from rich.console import Console

TIGHT_SHARE, MODEL = 0.5, Model(rows=2, sequence=512)
IGNORED = -100  # what transformers' losses leave out
BARS = {  # ratio of times to the largest that meets the target
    "castor ample / deepspeed": 1.0,
    "castor tight / deepspeed": None,
    "castor ring / deepspeed": None,
    "castor ample / plain": None,
    "castor tight / plain": None,
}


def make_deepspeed(rank: int, model: Model) -> tuple[Step, Report]:
    """DeepSpeed's Ulysses: attention of transformers' model, and the engine around it."""
    import torch
    from torch import distributed
    from torch.nn.functional import pad

    size = distributed.get_world_size()
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(size))
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed(dist_backend="gloo")
    module = build(model)
    groups = UlyssesSPAttentionHF.register_with_transformers(
        module, "sdpa", size, model.rows, seq_length=model.sequence, seq_length_is_variable=False
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": model.rows,
        "gradient_clipping": 0.0,  # 1.0 where nothing is said
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mpu=groups)
    positions = torch.arange(model.sequence).expand(model.rows, -1).chunk(size, 1)[rank]
    num_labels = model.rows * (model.sequence - 1)

    def step(i: int) -> float:
        batch = model.batch(i)
        # Shifted before they are cut: a rank's last token has the next rank's first as its label.
        following = pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].chunk(size, 1)[rank]
        ids = batch["input_ids"].chunk(size, 1)[rank]
        # Of the mean over all tokens this rank's share: the engine adds gradients up.
        share = engine(
            input_ids=ids, position_ids=positions, labels=ids,
            shift_labels=following.contiguous(), num_items_in_batch=num_labels,
        ).loss  # fmt: skip
        engine.backward(share)
        engine.step()
        return float(share.item()) * size

    return step, dict


def start_contenders(model: Model, console: Console, size: int) -> dict[str, Ranks]:
    def start(name: str, device_memory: int | None, mode: str = "all_to_all") -> Ranks:
        return Ranks.start(name, size, make_castor, model, device_memory, mode, "sp_size")

    found = {
        "plain": Ranks.start("plain PyTorch, one process", 1, make_plain, model),
        "castor ample": start("castor, ample budget", None),
    }
    budget = tight(found["castor ample"].report()[0], TIGHT_SHARE)
    name = f"castor, tight({TIGHT_SHARE}) = {budget / 2**20:.0f} MiB a rank"
    found["castor tight"] = start(name, budget)
    found["castor ring"] = start("castor, keys in a ring", None, "ring_attn")
    if find_spec("deepspeed") is None:
        console.print("[yellow]SKIPPED: DeepSpeed Ulysses: deepspeed is not installed")
    else:
        found["deepspeed"] = Ranks.start("DeepSpeed Ulysses", size, make_deepspeed, model)
    return found


def main() -> int:
    parser = command_line("sequence_parallel", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    arguments = parser.parse_args()
    console = Console(width=110)
    machine = describe_machine()

    size = arguments.ranks
    model = replace(QUICK, width=2 * HEAD_WIDTH) if arguments.quick else MODEL
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    found = start_contenders(model, console, size)
    title = f"Llama, {size} ranks divide each sequence, {model.rows} x {model.sequence} tokens"
    figures = {"ranks": size} | measure(
        found, rounds, steps, bars=BARS, reference="plain", title=title, console=console
    )
    write_record(arguments, "sequence_parallel", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
