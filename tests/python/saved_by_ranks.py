"""What ranks have saved is what one process saves, and goes on with."""

from pathlib import Path
from typing import Any

from helpers import Boosted, equal
from tensor_cases import boost
from zoo import Case


def loaded_by_one(
    case: Case, directory: Path, name: str, scratch: Path, *, ties: bool = False, **settings: Any
) -> Boosted:
    """One process's model after tensor_cases.save_and_go_on, with the run that ranks have saved.

    All files have the bytes that this process writes, and transformers reads the model, unless it
    ties weights (`ties`) that the file has apart.
    """
    boosted = boost(case, **settings)
    boosted.booster.save_model(boosted.model, scratch / "fresh")
    weights = "model.safetensors"
    theirs = directory / f"{name}-fresh" / weights
    assert (scratch / "fresh" / weights).read_bytes() == theirs.read_bytes()
    assert boosted.booster.load(directory / name, boosted.model, boosted.optimizer).step == 3
    boosted.booster.save(scratch / "again", boosted.model, boosted.optimizer)
    for part in (f"model/{weights}", "optimizer/optimizer.safetensors", "optimizer/optimizer.json"):
        again, written = (
            run / "step-00000003" / part for run in (scratch / "again", directory / name)
        )
        assert again.read_bytes() == written.read_bytes()
    if not ties:
        model = type(boosted.model).from_pretrained(directory / f"{name}-model")
        for mine, other in zip(boosted.model.parameters(), model.parameters(), strict=True):
            assert equal(mine.detach(), other.detach())
    return boosted
