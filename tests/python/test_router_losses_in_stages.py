"""Mixtures in stages whose loss is of the routers of all layers, too."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import router_stage_cases
from castor.planner.simulated_rank import SimulatedModel
from pipeline_cases import MICROBATCHES, batch
from pipeline_cases import plain as plain_losses
from rank_processes import found, found_by_each
from router_stage_cases import (
    BASE,
    COMPILED,
    IN_FP32,
    KINDS,
    MIXTURES,
    STEPS,
    TRAINED,
    UNCHANGED,
    WITH_EXPERTS,
    base_of,
    of_routers,
    plain,
)
from stage_call_cases import generate
from tensor_cases import FAMILIES, LOSS, LR, MAX_NORM
from zoo import LENGTH, Case

WEIGHTS = 1e-5
"""How near weights are, absolute."""


@cache
def evaluated(name: str) -> dict[str, Any]:
    case = MIXTURES[name]
    model, whole = case.model(), batch(case, 0)
    with torch.no_grad():
        outputs: Any = model(**whole)
        parts = [
            model(**{key: value.chunk(MICROBATCHES)[i] for key, value in whole.items()})
            for i in range(MICROBATCHES)
        ]
    return {
        "loss": outputs.loss.item(),
        "aux_loss": outputs.aux_loss.item(),
        "router_logits": outputs.router_logits,
        "scheduled": sum(one.loss.item() for one in parts) / MICROBATCHES,
        "parts": [one.aux_loss.item() for one in parts],
    }


def assert_evaluated(name: str, of_ranks: list[Any], last: int) -> None:
    expected = evaluated(name)
    for rank, seen in enumerate(of_ranks):
        for key in ("loss", "aux_loss", "scheduled"):
            assert seen[key] == pytest.approx(expected[key], rel=1e-6), key
        for mine, theirs in zip(seen["router_logits"], expected["router_logits"], strict=True):
            assert torch.allclose(torch.tensor(mine), theirs, atol=1e-6)
        assert (seen["parts"] is not None) == (rank >= last)
        for mine, theirs in zip(seen["parts"] or (), expected["parts"], strict=False):
            assert mine == [pytest.approx(theirs, rel=1e-6), len(expected["router_logits"])]


def assert_weights(path: Path, name: str) -> None:
    written = load_file(path / "model.safetensors")
    for key, expected in plain(name)[1].items():
        if key in written:
            assert (written[key] - expected).abs().max() < WEIGHTS, key


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("schedules")
    return directory, found(router_stage_cases.schedules, 2, directory)


@pytest.mark.parametrize("trained", TRAINED)
def test_losses_and_weights_are_plain_pytorchs(trained: str, schedules: Any) -> None:
    directory, seen = schedules
    name = trained.split()[0]
    for losses in seen[trained]:
        assert losses == pytest.approx(plain(name)[0], rel=LOSS)
    assert_weights(directory / trained, name)


def test_router_losses_are_there() -> None:
    with_losses = evaluated("mixtral")
    assert 0.1 * with_losses["aux_loss"] > 1e-2 * with_losses["loss"]


@pytest.mark.parametrize("trained", TRAINED)
def test_all_ranks_evaluate_as_one_process(trained: str, schedules: Any) -> None:
    of_ranks = schedules[1][f"{trained} evaluated"]
    name, style = trained.split()
    if style == "zbv":  # whose last stage is the first rank's
        of_ranks = of_ranks[::-1]
    assert_evaluated(name, of_ranks, 1)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(router_stage_cases.settings, 2, tmp_path_factory.mktemp("settings"))


@pytest.mark.parametrize("setting", UNCHANGED)
def test_settings_change_nothing(setting: str, settings: Any) -> None:
    assert settings[setting] == settings["1f1b ample"]
    assert settings[setting] == pytest.approx(plain("mixtral")[0], rel=LOSS)


@pytest.mark.parametrize("setting", ["tiles", *(f"{style} compiled" for style in COMPILED)])
def test_logits_are_tiled_and_blocks_compiled(setting: str, settings: Any) -> None:
    assert settings[setting] == pytest.approx(plain("mixtral")[0], rel=LOSS)


def test_routers_that_compute_in_fp32_send_fp32(settings: Any) -> None:
    assert settings["in fp32 fp32"] == pytest.approx(plain_losses(IN_FP32, STEPS), rel=LOSS)
    assert settings["mixtral bf16"] == pytest.approx(settings["1f1b ample"], rel=2e-3)
    assert settings["in fp32 bf16"] == pytest.approx(settings["in fp32 fp32"], rel=2e-3)


def test_a_call_asks_for_the_router_loss(settings: Any) -> None:
    case = MIXTURES["mixtral"]
    model: Any = case.model()
    asked = evaluated("mixtral")["scheduled"]
    model.config.output_router_logits = False
    with torch.no_grad():
        without = model(**batch(case, 0)).loss.item()
    assert settings["asked"] == pytest.approx(asked, rel=LOSS)
    assert settings["not asked"] == pytest.approx(without, rel=LOSS)
    assert abs(asked - without) > 1e-2


def test_a_model_that_generates_without_trains_on_with_its_router_loss(settings: Any) -> None:
    model: Any = MIXTURES["mixtral"].model()
    model.config.output_router_logits = False
    assert settings["generated"] == [generate(model, MIXTURES["mixtral"])] * 2
    assert settings["trained afterwards"] == settings["1f1b ample"]


@pytest.mark.parametrize("style", BASE)
def test_a_base_model_has_a_loss_of_its_users(style: str, settings: Any) -> None:
    base = Case("base", lambda: base_of(MIXTURES["mixtral"]), MIXTURES["mixtral"].batch)
    model = base.model()
    inputs = {key: x for key, x in batch(base, 0).items() if key != "labels"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with torch.no_grad():
        called = of_routers(model(**inputs), None).item()
    losses = []
    for _ in range(3):
        total = 0.0
        for i in range(MICROBATCHES):
            part = {key: x.chunk(MICROBATCHES)[i] for key, x in inputs.items()}
            loss = of_routers(model(**part), None) / MICROBATCHES
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert settings[f"{style} base"] == pytest.approx(losses, rel=LOSS)
    assert settings[f"{style} base called"] == [pytest.approx(called, rel=LOSS)] * 2


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("composed")
    return directory, found(router_stage_cases.composed, 4, directory)


@pytest.mark.parametrize("style", WITH_EXPERTS)
def test_stages_go_with_expert_parallelism(style: str, composed: Any) -> None:
    directory, seen = composed
    for losses in seen[f"ep 2 {style}"]:
        assert losses == pytest.approx(plain("mixtral")[0], rel=LOSS)
    assert_weights(directory / f"ep-{style}", "mixtral")
    of_ranks = seen[f"ep 2 {style} evaluated"]
    assert_evaluated("mixtral", of_ranks[2:] + of_ranks[:2] if style == "zbv" else of_ranks, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_go_with_divided_layers(kind: str, composed: Any) -> None:
    for losses in composed[1][kind]:
        assert losses == pytest.approx(plain("mixtral")[0], rel=LOSS)


def test_replicas_of_the_stages_agree(composed: Any) -> None:
    first, same, second, too = composed[1]["dp 2"]
    assert first == same
    assert second == too


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(router_stage_cases.refused, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("another form", "the router loss of this DogeForCausalLM (output_router_logits) needs "),
        ("none", "the router loss of this LlamaForCausalLM (output_router_logits) needs the rout"),
        ("call", "its _can_record_outputs names no class of modules that give them"),
        ("sequences", "its router loss needs all tokens (output_router_logits)"),
    ],
)  # fmt: skip
def test_router_logits_of_another_form_are_named_on_every_rank(
    what: str, part: str, refused: Any
) -> None:
    for of_rank in refused:
        assert of_rank[what].startswith("NotImplementedError")
        assert part in of_rank[what]


def test_the_models_work_without(refused: Any) -> None:
    for of_rank in refused:
        assert of_rank["works"] == pytest.approx(plain_losses(FAMILIES["llama"], 1), rel=LOSS)
        assert of_rank["works too"] == refused[0]["works too"]


def test_simulated_stages_send_router_logits_too(tmp_path: Path) -> None:
    model: Any = MIXTURES["qwen3_moe"].model()
    model.config.architectures = [type(model).__name__]
    path = tmp_path / "config.json"
    model.config.to_json_file(path, use_diff=False)
    simulated_model = SimulatedModel(path, precision="bf16", state_format="split")

    def record(rank: int, ranks: int, each: int) -> Any:
        own, stages = range(rank, ranks * each, ranks), ranks * each
        return simulated_model.record(own, stages, rows=2, sequence=LENGTH, tile=0)

    whole = record(0, 1, 1)
    recorded = [record(rank, 2, 2) for rank in range(2)]
    sent = {number: one.sent_bytes for rank in recorded for number, one in rank.passes.items()}
    width, experts = model.config.hidden_size, model.config.num_experts
    each = 2 * LENGTH * 2  # bytes, of a number a token; blocks 1 and 3 have routers
    assert sent == {0: each * width, 1: each * (width + experts), 2: each * (width + experts), 3: 0}
    assert record(0, 1, 1).passes[0].flops == whole.passes[0].flops  # all is as it was
