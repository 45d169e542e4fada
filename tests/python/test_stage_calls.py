"""Models in stages that are called without gradients: generate, evaluations of a user's own."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import stage_call_cases
from pipeline_cases import DEEP, STAGED, plain
from rank_processes import assert_said, found, found_by_each, run
from stage_call_cases import CALLED, COMPOSED, GENERATED, GENERATING, TIGHT, WAYS, generate
from tensor_cases import FAMILIES, LOSS
from zoo import Case


@cache
def tokens(name: str, way: str) -> list[list[int]]:
    return generate(DEEP[name].model().eval(), DEEP[name], **WAYS[way])


def assert_called_as_plain(case: Case, of_ranks: list[Any]) -> None:
    with torch.no_grad():
        outputs = case.model().eval()(**stage_call_cases.batch(case, 0))
    for loss, logits in of_ranks:
        assert loss == pytest.approx(outputs.loss.item(), rel=1e-6)
        assert torch.allclose(torch.tensor(logits), outputs.logits, atol=1e-5)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(stage_call_cases.families, 2, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("name", GENERATING)
def test_every_rank_generates_plain_pytorchs_tokens(name: str, families: Any) -> None:
    expected = generate(STAGED[name].model(), STAGED[name])
    assert families[name] == [expected] * 2


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(stage_call_cases.ways, 2, tmp_path_factory.mktemp("ways"))


@pytest.mark.parametrize("generated", GENERATED)
def test_tokens_depend_on_no_way_and_no_schedule(generated: str, ways: Any) -> None:
    name, _, way = generated.split(" ", 2)
    assert ways[generated] == [tokens(name, way)] * 2


@pytest.mark.parametrize("called", CALLED)
def test_a_call_has_the_outputs_of_a_whole_model_on_every_rank(called: str, ways: Any) -> None:
    assert_called_as_plain(DEEP[called.split()[0]], ways[f"{called} call"])


def test_an_encoder_is_called_too(ways: Any) -> None:
    assert_called_as_plain(FAMILIES["bert"], ways["bert"])


@pytest.mark.parametrize("called", CALLED)
def test_training_goes_on_as_if_nothing_had_been_called(called: str, ways: Any) -> None:
    expected = plain(DEEP[called.split()[0]])
    assert ways[f"{called} trained"] == pytest.approx(expected, rel=LOSS)


@pytest.mark.parametrize("name", TIGHT)
def test_a_stage_that_does_not_fit_generates(name: str, ways: Any) -> None:
    assert ways[f"{name} tight"] == [tokens(name, "greedy")] * 2
    budget, peak = ways[f"{name} bytes"]
    assert peak <= budget


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(stage_call_cases.composed, 4, tmp_path_factory.mktemp("composed"))


@pytest.mark.parametrize("kind", COMPOSED)
def test_stages_generate_beside_other_divisions(kind: str, composed: Any) -> None:
    assert composed[kind] == [tokens(kind.split()[0], "greedy")] * 4


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(stage_call_cases.refused, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("gradients", "UsageError", "cannot be called with gradients: use booster.execute_pipe"),
        ("hidden", "NotImplementedError", "output_hidden_states=True asks for what all layers"),
        ("attentions", "NotImplementedError", "output_attentions=True asks for what all layers"),
        ("schedule", "NotImplementedError", "output_hidden_states=True asks for what all layers"),
        ("tuple", "NotImplementedError", "return_dict=False leaves the outputs"),
        ("inputs", "UsageError", "differ in the inputs of LlamaForCausalLM"),
        ("arguments", "UsageError", "differ in the inputs of LlamaForCausalLM"),
        ("cache", "NotImplementedError", "other things than keys and values of tokens (Quantised)"),
        ("layers", "NotImplementedError", "other things than keys and values of tokens (conv)"),
        ("no cache", "nothing", "nothing"),
    ],
)
def test_what_cannot_be_called_is_named_on_every_rank(
    what: str, kind: str, part: str, refused: Any
) -> None:
    assert_said((of_rank[what] for of_rank in refused), kind, part)


def test_a_call_works_after_each_refusal(refused: Any) -> None:
    assert refused[0]["works"] == refused[1]["works"] == pytest.approx(plain(DEEP["llama"], 1)[0])


def test_a_rank_that_fails_in_a_call_is_waited_for_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASE", "fails")
    own, others = reversed(found_by_each(stage_call_cases.one_fails, 2, tmp_path))
    assert own[0] == "ValueError: no more"
    assert others[0].startswith("Error: rank 1 of 2 of the pipeline has failed: ValueError: no mo")
    for _, seconds, later in (own, others):
        assert seconds < 20
        assert "have let go of each other when a step failed" in later


def test_a_rank_that_dies_in_a_call_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASE", "dies")
    outcomes = run(stage_call_cases.one_fails, 2, tmp_path, timeout=60)
    assert [outcome.code for outcome in outcomes] == [0, -9]
    said, seconds, _ = json.loads((tmp_path / "one_fails0.json").read_text())
    assert "rank 1 (process" in said
    assert seconds < 20
