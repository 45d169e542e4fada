"""Image models in stages: patches of images are tokens behind one of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import image_stage_cases
from castor.planner.simulated_rank import SimulatedModel
from image_stage_cases import (
    CONFIG,
    FLOATING,
    KINDS,
    OBLONG,
    STEPS,
    TRAINED,
    VIT,
    interpolated,
    pooled,
)
from pipeline_cases import MICROBATCHES, batch
from pipeline_cases import plain as plain_losses
from rank_processes import found, found_by_each
from tensor_cases import LOSS, boost
from zoo import Case

CASES = {case.name: case for case in (VIT, OBLONG)}


def plain(name: str) -> list[float]:
    return plain_losses(CASES[name], STEPS)


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("schedules")
    return directory, found(image_stage_cases.schedules, 2, directory)


@pytest.mark.parametrize("trained", TRAINED)
def test_losses_are_plain_pytorchs(trained: str, schedules: Any) -> None:
    for losses in schedules[1][trained]:
        assert losses == pytest.approx(plain(trained.split()[0]), rel=LOSS)


@pytest.mark.parametrize("trained", TRAINED)
def test_all_ranks_have_the_outputs_of_a_call(trained: str, schedules: Any) -> None:
    name = trained.split()[0]
    with torch.no_grad():
        outputs = CASES[name].model()(**batch(CASES[name], 0))
    for loss, logits in schedules[1][f"{trained} called"]:
        assert loss == pytest.approx(outputs.loss.item(), rel=1e-6)
        assert torch.allclose(torch.tensor(logits), outputs.logits, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_files_depend_on_no_schedule(name: str, schedules: Any) -> None:
    directory, _ = schedules
    paths = [directory / trained for trained in TRAINED if trained.startswith(f"{name} ")]
    written = [(path / "model.safetensors").read_bytes() for path in paths]
    assert written == written[:1] * len(written)
    model = hf.ViTForImageClassification.from_pretrained(paths[-1])
    with torch.no_grad():
        later = model(**batch(CASES[name], STEPS - 1)).loss.item()
    assert later < plain(name)[-1]  # it has learnt from these


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(image_stage_cases.uses, 2, tmp_path_factory.mktemp("uses"))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pixels_have_any_floating_type(precision: str, dtype: torch.dtype, uses: Any) -> None:
    given: Any = batch(VIT, 0)
    given["pixel_values"] = given["pixel_values"].to(dtype)
    with torch.no_grad():
        expected = VIT.model()(**given).loss.item()
    near = LOSS if precision == "fp32" else 2e-2
    assert uses[f"{precision} {dtype}"] == pytest.approx(expected, rel=near)


def test_images_of_another_size(uses: Any) -> None:
    loss, (called, logits) = uses["interpolated"]
    with torch.no_grad():
        outputs = VIT.model()(**interpolated(0))
    assert loss == pytest.approx(outputs.loss.item(), rel=LOSS)
    assert called == pytest.approx(outputs.loss.item(), rel=1e-6)
    assert torch.allclose(torch.tensor(logits), outputs.logits, atol=1e-5)
    assert uses["afterwards"] == pytest.approx(plain("vit4")[0], rel=LOSS)


def test_a_base_model_has_a_loss_of_the_users(uses: Any) -> None:
    model = Case("base", lambda: hf.ViTModel(hf.ViTConfig(**CONFIG)), VIT.batch).model()
    with torch.no_grad():
        parts = batch(VIT, 0)["pixel_values"].chunk(MICROBATCHES)
        losses = [pooled(model(pixel_values=part), None).item() for part in parts]
    assert uses["base"] == pytest.approx(sum(losses) / MICROBATCHES, rel=LOSS)


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(image_stage_cases.composed, 4, tmp_path_factory.mktemp("composed"))


@pytest.mark.parametrize("kind", KINDS)
def test_stages_go_with_divided_layers(kind: str, composed: Any) -> None:
    for losses in composed[kind]:
        assert losses == pytest.approx(plain("vit4"), rel=LOSS)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(image_stage_cases.refused, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("masked", "NotImplementedError: a ViTForMaskedImageModeling makes images again of its "),
        ("tokens", "NotImplementedError: sequence_parallelism_mode='split_gather' shards tokens"),
        ("no images", "UsageError: the batch has no images: give pixel_values of shape (rows, "),
    ],
)
def test_what_does_not_go_with_images_is_named_on_every_rank(
    what: str, says: str, refused: Any
) -> None:
    for of_rank in refused:
        assert of_rank[what].startswith(says)
        assert of_rank["works"] == pytest.approx(plain("vit4")[:1], rel=LOSS)


def test_one_process_divides_batches_of_images() -> None:
    boosted = boost(VIT, 1, num_microbatches=MICROBATCHES)
    given = iter([batch(VIT, 0)])
    done = boosted.booster.execute_pipeline(given, boosted.model, None, boosted.optimizer)
    assert done["loss"].item() == pytest.approx(plain("vit4")[0], rel=LOSS)


def test_simulated_stages(tmp_path: Path) -> None:
    config = hf.ViTConfig(**CONFIG, architectures=["ViTForImageClassification"])
    path = tmp_path / "config.json"
    config.to_json_file(path, use_diff=False)
    simulated_model = SimulatedModel(path, precision="fp32", state_format="fp32")

    def record(rank: int, ranks: int, each: int) -> Any:
        own, stages = range(rank, ranks * each, ranks), ranks * each
        return simulated_model.record(own, stages, rows=2, sequence=1, tile=0)

    whole = record(0, 1, 1)
    passes = [one for rank in range(2) for one in record(rank, 2, 2).passes.values()]
    assert sum(one.flops for one in passes) == whole.passes[0].flops
    hidden = 2 * (1 + 4 * 4) * CONFIG["hidden_size"] * 4
    assert sorted(one.sent_bytes for one in passes) == [0, hidden, hidden, hidden]
