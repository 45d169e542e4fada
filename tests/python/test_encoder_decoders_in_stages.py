"""Encoder-decoders in stages: the encoder's blocks, then the decoder's, over several ranks."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import encoder_stage_cases
from castor.estimate.workload import Workload
from castor.planner.layout_search import LayoutSearch
from encoder_stage_cases import (
    CALLED,
    COMPOSED,
    CUTS,
    FAMILIES,
    GENERATED,
    LATER,
    SAVED,
    SOME,
    STEPS,
    T5,
    TALKING,
    TARGET,
    TRAINED,
    UNEVEN,
)
from pipeline_cases import accumulate, batch, train_whole
from pipeline_cases import plain as plain_of
from rank_processes import assert_said, found, found_by_each
from saved_by_ranks import loaded_by_one
from tensor_cases import LOSS
from tensor_cases import boost as boost_unsharded
from test_layouts import cluster


def plain(name: str) -> list[float]:
    return plain_of(FAMILIES[name], STEPS)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(encoder_stage_cases.families, 2, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("trained", TRAINED)
def test_losses_are_plain_pytorchs(trained: str, families: Any) -> None:
    assert families[trained] == pytest.approx(plain(trained.split()[0]), rel=LOSS)


@pytest.mark.parametrize("name", SOME)
def test_ranks_have_parts(name: str, families: Any) -> None:
    """Beside these what is tied, and what position biases are made of."""
    assert 1 < families[f"{name} shares"] < 1.1


@pytest.mark.parametrize("cut", CUTS)
def test_a_stage_may_begin_anywhere(cut: str, families: Any) -> None:
    assert families[f"t5 {cut}"] == pytest.approx(plain("t5"), rel=LOSS)


def test_rows_may_differ_in_length(families: Any) -> None:
    assert families["uneven"] == pytest.approx(plain_of(UNEVEN, STEPS), rel=LOSS)


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(encoder_stage_cases.composed, 4, tmp_path_factory.mktemp("composed"))


@pytest.mark.parametrize("kind", COMPOSED)
def test_stages_go_with_shards_and_replicas(kind: str, composed: Any) -> None:
    assert composed[kind] == pytest.approx(plain(kind.split()[0]), rel=LOSS)


@pytest.mark.parametrize("kind", LATER)
def test_what_some_stages_save_others_go_on_with(kind: str, composed: Any) -> None:
    later, again = composed[f"{kind} later"]
    assert again == pytest.approx(later, rel=LOSS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("saved")
    alone = boost_unsharded(T5, 1)
    train_whole(T5, alone, range(3))
    alone.booster.save(directory / "alone", alone.model, alone.optimizer)
    return (
        directory,
        found(encoder_stage_cases.saved, 2, directory),
        train_whole(T5, alone, range(3, 6)),
    )


@pytest.mark.parametrize("name", SAVED)
def test_what_stages_save_is_what_one_process_saves(name: str, saved: Any, tmp_path: Path) -> None:
    directory, later, _ = saved
    case = FAMILIES[name]
    # transformers ties T5's output embedding whatever is in a file.
    boosted = loaded_by_one(case, directory, name, tmp_path, ties=name == "untied")
    assert train_whole(case, boosted, range(3, 6)) == pytest.approx(later[name], rel=LOSS)


def test_stages_go_on_with_what_one_process_saved(saved: Any) -> None:
    _, found, later = saved
    assert found["alone"] == pytest.approx(later, rel=LOSS)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(encoder_stage_cases.calls, 2, tmp_path_factory.mktemp("calls"))


@cache
def outputs() -> Any:
    with torch.no_grad():
        return T5.model().eval()(**batch(T5, 0))


@pytest.mark.parametrize("style", CALLED)
def test_a_model_in_stages_is_evaluated(style: str, calls: Any) -> None:
    # The mean of means of micro-batches, whose labels are as many in each.
    assert calls[f"{style} evaluated"] == pytest.approx(outputs().loss.item(), rel=1e-6)
    assert torch.allclose(torch.tensor(calls[f"{style} logits"]), outputs().logits, atol=1e-5)
    assert calls[f"{style} trained"] == pytest.approx(plain("t5"), rel=LOSS)


@pytest.mark.parametrize("style", CALLED)
def test_a_call_has_the_outputs_of_a_whole_model_on_every_rank(style: str, calls: Any) -> None:
    with torch.no_grad():
        encoder = T5.model().eval().get_encoder()
        states = encoder(**encoder_stage_cases.prompts()).last_hidden_state
    for loss, logits in calls[f"{style} called"]:
        assert loss == pytest.approx(outputs().loss.item(), rel=1e-6)
        assert torch.allclose(torch.tensor(logits), outputs().logits, atol=1e-5)
    for encoded in calls[f"{style} encoded"]:
        assert torch.allclose(torch.tensor(encoded), states, atol=1e-5)


@pytest.mark.parametrize("generated", GENERATED)
def test_tokens_depend_on_no_way_and_no_schedule(generated: str, calls: Any) -> None:
    how = encoder_stage_cases.ways()[generated.split(" ", 1)[1]]
    expected = encoder_stage_cases.generate(TALKING.model(), **how)
    assert calls[generated] == [expected] * 2


def test_four_stages_generate(composed: Any) -> None:
    assert composed["pp 4 tokens"] == [encoder_stage_cases.generate(TALKING.model())] * 4


@cache
def norm() -> float:
    """Of the gradients of two batches, in one process."""
    boosted = boost_unsharded(T5, 1)
    train_whole(T5, boosted, range(STEPS))
    for cut in (10, 8):
        short = {key: value[:, :cut].contiguous() for key, value in batch(T5, STEPS).items()}
        accumulate(boosted, short)
    boosted.optimizer.step()
    return boosted.report().gradient_norm


@pytest.mark.parametrize("style", CALLED)
def test_what_is_shared_counts_once_in_the_norm(style: str, calls: Any) -> None:
    assert calls[f"{style} norm"] == pytest.approx(norm(), rel=1e-4)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(encoder_stage_cases.refused, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("longt5", "NotImplementedError", "cannot split a LongT5ForConditionalGeneration into"),
        ("bart", "NotImplementedError", "cannot split a BartForConditionalGeneration into"),
        ("encoder", "NotImplementedError", "cannot split a T5EncoderModel into stages"),
        ("model", "NotImplementedError", "make tokens of tokens into stages (ForConditionalGen"),
        ("questions", "NotImplementedError", "and a T5ForQuestionAnswering is none"),
        ("blocks", "UsageError", "[4, 5] is of 2 stages and 9 blocks, and there are 2 "),
        ("sequences", "NotImplementedError", "does not go through transformers' registry"),
        ("gradients", "UsageError", "cannot be called with gradients: use booster.execute_pipe"),
        ("encoder gradients", "UsageError", "of this T5Stack, which cannot be called with grad"),
        ("outputs", "UsageError", "the batch has encoder_outputs, and the stages"),
        ("no inputs", "UsageError", "the batch has no input_ids"),
        ("no decoder", "UsageError", "the batch has no decoder_input_ids"),
        ("called without", "UsageError", "the batch has no decoder_input_ids"),
        ("hidden", "NotImplementedError", "output_hidden_states=True asks for what all layers"),
        ("inputs", "UsageError", "differ in the inputs of T5ForConditionalGeneration"),
    ],
)
def test_what_does_not_go_with_stages_is_named_on_every_rank(
    what: str, kind: str, part: str, refused: Any
) -> None:
    assert_said((of_rank[what] for of_rank in refused), kind, part)


def test_the_model_works_after_each_refusal(refused: Any) -> None:
    assert refused[0]["works"] == refused[1]["works"] == pytest.approx(plain("t5")[:1], rel=LOSS)


def test_a_plan_has_no_stages_of_encoder_decoders(tmp_path: Path) -> None:
    config: Any = T5.model().config
    config.architectures = ["T5ForConditionalGeneration"]
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    workload = Workload(batch=4, sequence=TARGET, precision="bf16", state_format="fp32")
    search = LayoutSearch(tmp_path / "config.json", workload)
    assert "split a T5ForConditionalGeneration into simulated stages" in search.refused["stages"]
    layouts = search.layouts(cluster(ranks_per_node=2))
    assert layouts
    assert {layout.dims.pp for layout in layouts} == {1}
