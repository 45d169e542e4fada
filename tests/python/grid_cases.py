"""What test_whole_grid.py runs on several ranks: families x ways to divide them, in little memory.

As in tensor_cases: `python grid_cases.py grid DIRECTORY`, with the way in WAY, and the families,
with spaces between, in FAMILIES.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import as_rank
from helpers import Boosted, margin
from pipeline_cases import batch, of_four_blocks
from tensor_cases import FAMILIES, LR, RING, accumulated, boost, of_all, said, write
from zoo import Batch, Case

STEPS, ROWS, MICROBATCHES = 4, 4, 2
OF_THE_ISSUE = ("gpt2", "llama", "qwen3", "mistral", "gemma2", "opt", "bloom", "t5", "bert",
                "falcon", "glm", "mixtral")  # fmt: skip
CASES = FAMILIES | {"mixtral": of_four_blocks(FAMILIES["mixtral"])}
"""Of which half a rank's part has room for the largest module twice."""
DECODERS = ("gpt2", "llama", "qwen3", "mistral", "gemma2", "opt", "glm", "mixtral")
"""Whose sequences are divided."""
_TWO_STAGES = {"pp_size": 2, "num_microbatches": MICROBATCHES}
WAYS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "tp 2": (2, {"size": 2}, OF_THE_ISSUE),
    "pp 2": (2, _TWO_STAGES, OF_THE_ISSUE),
    "sp 2, all_to_all": (2, {"sp_size": 2}, DECODERS),
    "sp 2, all_gather": (
        2, {"sp_size": 2, "sequence_parallelism_mode": "all_gather"}, DECODERS
    ),
    "sp 2, ring_attn": (2, {"sp_size": 2} | RING, DECODERS),
    "ep 2": (2, {"ep_size": 2}, ("mixtral",)),
    "tp 2 x dp 2": (4, {"size": 2}, OF_THE_ISSUE),
    "pp 2 x dp 2": (4, _TWO_STAGES | {"zero_stage": 1}, OF_THE_ISSUE),
    "tp 2 x pp 2": (4, {"size": 2} | _TWO_STAGES, OF_THE_ISSUE),
}  # fmt: skip
"""Ranks, arguments of tensor_cases.boost, families that have this way."""


def copies_of(way: str) -> int:
    """Ranks, or groups of them, with data of their own."""
    size, given, _ = WAYS[way]
    return size // (given.get("size", 1) * given.get("sp_size", 1) * given.get("pp_size", 1))


def own_rows(whole: Batch, copy: int, copies: int) -> Batch:
    return {name: value[copy::copies].contiguous() for name, value in whole.items()}


def expected(case: Case, way: str) -> list[float]:
    """Losses of plain PyTorch, in one process with the same micro-batches."""
    copies, count = copies_of(way), WAYS[way][1].get("num_microbatches", 1)
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def parts(seed: int) -> list[Batch]:
        whole = batch(case, seed, ROWS)
        return [
            {name: value.chunk(count)[i] for name, value in own_rows(whole, copy, copies).items()}
            for copy in range(copies)
            for i in range(count)
        ]

    return accumulated(model, optimizer, (parts(seed) for seed in range(STEPS)))


def train(case: Case, boosted: Boosted, way: str) -> list[float]:
    """Mean losses of all ranks."""
    copies, staged = copies_of(way), "pp_size" in WAYS[way][1]
    sharing = distributed.get_world_size() // copies
    losses = []
    for seed in range(STEPS):
        mine = own_rows(batch(case, seed, ROWS), distributed.get_rank() // sharing, copies)
        if staged:
            execute = boosted.booster.execute_pipeline
            loss = execute(iter([mine]), boosted.model, None, boosted.optimizer)["loss"]
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
            losses.append(loss.item())
        else:
            losses.append(boosted.step(boosted.model(**mine).loss))
    return torch.tensor(of_all(losses), dtype=torch.float64).mean(0).tolist()


def cell(case: Case, way: str, scratch: Path) -> dict[str, Any]:
    """Losses with room for all, in half of what this rank's part takes, and with states on NVMe."""
    given = WAYS[way][1]
    ample = boost(case, **given)
    found: dict[str, Any] = {"ample": train(case, ample, way)}
    own = sum(param.nbytes for param in ample.model.parameters())
    nonmodel = ample.report().peak_nonmodel_bytes
    tight = nonmodel + margin(ample.model, 0.5)
    found["whole"] = of_all(nonmodel + own)
    del ample
    for name, more in {
        "tight": {},
        "nvme": {"nvme_path": scratch, "nvme_offload_fraction": 1.0},
    }.items():
        boosted = boost(case, device_memory=tight, **given, **more)  # type: ignore[arg-type]
        found[name] = train(case, boosted, way)
        report = boosted.report()
        found[f"{name} peaks"] = of_all(report.peak_device_bytes)
        found[f"{name} bytes on NVMe"] = of_all(report.nvme_written_bytes)
        del boosted
    found["tight budgets"] = of_all(tight)
    return found


def grid(directory: Path) -> None:
    """Each asked family in one way to divide it; what a rank raised instead."""
    way, found = os.environ["WAY"], {}
    for name in os.environ["FAMILIES"].split():
        scratch = directory / name
        scratch.mkdir(exist_ok=True)
        of_family: dict[str, Any] = {}
        raised = said(lambda: of_family.update(cell(CASES[name], way, scratch)))  # noqa: B023
        found[name] = of_family | {"raised": [one for one in of_all(raised) if one != "nothing"]}
    write(directory, "grid", found)


if __name__ == "__main__":
    as_rank.run(globals())
