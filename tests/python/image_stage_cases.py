"""What tests of image models in stages run on several ranks; as pipeline_cases.py."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

import as_rank
import grids
import pipeline_cases
from helpers import Boosted
from pipeline_cases import SCHEDULES, ZERO_BUBBLE, batch, boost
from tensor_cases import FAMILIES, of_all, said, write, write_own
from zoo import Batch, Case

STEPS = grids.steps(10)
STYLES: dict[str, dict[str, Any]] = {
    "1f1b": {}, "gpipe": {"pp_style": "gpipe"}, "interleaved": SCHEDULES["interleaved"],
    "zbv": ZERO_BUBBLE,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4, "num_labels": 10, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _vit(**settings: Any) -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**CONFIG | settings))


def _larger(seed: int) -> Batch:
    """Images of another size than the model's positions are of, and not all patches whole."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn((4, 3, 24, 32), generator=generator),
        "labels": torch.randint(0, 10, (4,), generator=generator),
    }


VIT = Case("vit4", _vit, FAMILIES["vit"].batch)
OBLONG = Case("oblong", lambda: _vit(image_size=(24, 32), patch_size=(4, 8)), _larger)
TRAINED = grids.some(
    tuple(f"{case.name} {style}" for case in (VIT, OBLONG) for style in STYLES),
    *("vit4 1f1b", "vit4 interleaved", "oblong zbv"),
)
KINDS: dict[str, dict[str, Any]] = grids.some({
    "tp 2": {"tp_size": 2}, "tp 2, zbv": {"tp_size": 2} | ZERO_BUBBLE, "pp 4": {"pp_size": 4},
}, "tp 2, zbv", "pp 4")  # fmt: skip
FLOATING = (torch.float16, torch.bfloat16, torch.float64)


def interpolated(seed: int) -> dict[str, Any]:
    return batch(Case("larger", _vit, _larger), seed) | {"interpolate_pos_encoding": True}


def schedules(directory: Path) -> None:
    """Losses in each schedule, whole files, and what a call of the whole gives."""
    found: dict[str, Any] = {}
    for trained in TRAINED:
        name, style = trained.split()
        case = VIT if name == "vit4" else OBLONG
        boosted = boost(case, **STYLES[style])
        found[f"{trained} called"] = of_all(_called(boosted, batch(case, 0)))
        found[trained] = of_all(pipeline_cases.train(case, boosted, 0, STEPS))
        boosted.booster.save_model(boosted.model, directory / trained)
    write(directory, "schedules", found)


def _called(boosted: Boosted, given: dict[str, Any]) -> list[Any]:
    with torch.no_grad():
        outputs = boosted.model(**given)
    return [outputs.loss.item(), outputs.logits.tolist()]


def uses(directory: Path) -> None:
    """Types of pixels, images of another size, a base model."""
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        boosted = boost(VIT, precision=precision)
        for dtype in FLOATING:
            given = batch(VIT, 0)
            given["pixel_values"] = given["pixel_values"].to(dtype)
            found[f"{precision} {dtype}"] = _once(boosted, given)
    boosted = boost(VIT)
    found["interpolated"] = [_once(boosted, interpolated(0)), _called(boosted, interpolated(0))]
    found["afterwards"] = _once(boosted, batch(VIT, 0))
    base = Case("base", lambda: hf.ViTModel(hf.ViTConfig(**CONFIG)), VIT.batch)
    boosted = boost(base)
    done = boosted.booster.execute_pipeline(
        iter([{"pixel_values": batch(base, 0)["pixel_values"]}]), boosted.model, pooled,
        boosted.optimizer,
    )  # fmt: skip
    found["base"] = done["loss"].item()
    write(directory, "uses", found)


def pooled(outputs: Any, _: Any) -> torch.Tensor:
    """A loss of what a base model gives."""
    loss: torch.Tensor = outputs.pooler_output.square().mean()
    return loss


def _once(boosted: Boosted, given: dict[str, Any]) -> float:
    execute = boosted.booster.execute_pipeline
    loss = execute(iter([given]), boosted.model, None, boosted.optimizer)["loss"]
    boosted.optimizer.zero_grad()
    return loss.item()  # type: ignore[no-any-return]


def composed(directory: Path) -> None:
    """On four ranks."""
    found = {
        kind: of_all(pipeline_cases.train(VIT, boost(VIT, **given), 0, STEPS))
        for kind, given in KINDS.items()
    }
    write(directory, "composed", found)


def refused(directory: Path) -> None:
    """What does not go with stages of images."""
    masked = Case("masked", lambda: hf.ViTForMaskedImageModeling(hf.ViTConfig(**CONFIG)), VIT.batch)
    boosted = boost(VIT)
    found = {
        "masked": said(lambda: boost(masked)),
        "tokens": said(
            lambda: boost(VIT, pp_size=1, tp_size=2, sequence_parallelism_mode="split_gather")
        ),
        "no images": said(lambda: _once(boosted, {"labels": batch(VIT, 0)["labels"]})),
        "works": pipeline_cases.train(VIT, boosted, 0, 1),
    }
    write_own(directory, "refused", found)


if __name__ == "__main__":
    as_rank.run(globals())
