"""Ranks that divide layers, and tokens of what lies between (`split_gather`)."""

from pathlib import Path
from typing import Any

import pytest

import pipeline_cases
import split_gather_cases
from rank_processes import assert_said, found, found_by_each, of_sizes
from split_gather_cases import (
    FOUR,
    IN_STAGES,
    SETTINGS,
    STAGES,
    TWO,
    WITH_COPIES,
    WITH_SETTINGS,
    case_of,
)
from tensor_cases import FAMILIES, LOSS, padded, plain
from tensor_cases import boost as boost_unsharded


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return of_sizes(split_gather_cases.families, tmp_path_factory)


@pytest.mark.parametrize(
    ("size", "name"), [(n, name) for n, names in ((2, TWO), (4, FOUR)) for name in names]
)
def test_losses_are_plain_pytorchs(size: int, name: str, families: Any) -> None:
    assert families(size)[name] == pytest.approx(plain(case_of(name)), rel=LOSS)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(split_gather_cases.settings, 2, tmp_path_factory.mktemp("settings"))


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_settings_change_nothing(name: str, settings: Any) -> None:
    first, *others = settings[name]
    assert first == pytest.approx(plain(FAMILIES[name]), rel=LOSS)
    assert len(others) >= len(SETTINGS)
    assert all(other == first for other in others)
    assert settings[f"{name} bf16"] == pytest.approx(first, rel=1e-3)


def test_the_loss_may_be_parallel_as_well(settings: Any) -> None:
    assert settings["loss"] == pytest.approx(plain(FAMILIES["llama"], batch=padded), rel=LOSS)


def test_experts_may_be_full(settings: Any) -> None:
    assert settings["experts"] == pytest.approx(plain(FAMILIES["mixtral"]), rel=LOSS)


def test_copies_of_the_model_take_other_data(tmp_path: Path) -> None:
    seen = found(split_gather_cases.data_too, 4, tmp_path)
    for name in WITH_COPIES:
        assert seen[name] == pytest.approx(plain(FAMILIES[name]), rel=LOSS)
        later, with_whole_tokens = seen[f"{name} later"]
        assert later == pytest.approx(with_whole_tokens, rel=LOSS)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(split_gather_cases.stages, 4, tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("name", IN_STAGES)
def test_stages_are_sharded_as_well(name: str, stages: Any) -> None:
    expected = pipeline_cases.plain(pipeline_cases.DEEP[name])
    for schedule in STAGES:
        assert stages[f"{name} {schedule}"] == pytest.approx(expected, rel=LOSS), schedule


def test_uses_without_gradients_are_as_before(tmp_path: Path) -> None:
    seen = found(split_gather_cases.uses, 2, tmp_path)
    case = FAMILIES["gpt2"]
    boosted = boost_unsharded(case)
    ids = case.batch(0)["input_ids"]
    generated = boosted.model.generate(  # type: ignore[operator]
        ids[:, :7], max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert seen["generated"] == generated.tolist()
    assert seen["evaluated between"] == pytest.approx(plain(case, 3), rel=LOSS)
    whole, divided = seen["frozen"]
    assert divided == pytest.approx(whole, rel=LOSS)


def test_ranks_drop_what_they_have_and_the_same_behind(tmp_path: Path) -> None:
    seen = found(split_gather_cases.dropout, 2, tmp_path)
    assert seen["keep"] == seen["recompute"]
    assert seen["keep"]["differ"]


def test_a_rank_keeps_its_shard_of_every_activation(tmp_path: Path) -> None:
    """Korthikanti et al. 2022, table 2: of a block each of t ranks keeps 1/t, and no byte more."""
    kept = found(split_gather_cases.activation_bytes, 2, tmp_path)
    assert kept["tokens"] * 2 == kept["whole"]
    assert kept["layers"] > 0.6 * kept["whole"]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(split_gather_cases.refused, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("odd", "UsageError", "sequences of 23 tokens; pad them to 24"),
        ("states", "NotImplementedError", "output_hidden_states=True"),
        ("t5", "NotImplementedError", "no row of blocks of a T5ForConditionalGeneration"),
        ("attention", "NotImplementedError", "'model.layers.0.self_attn.q_proj.weight'"),
        ("noise", "NotImplementedError", "'model.layers.0.mlp' draws random numbers"),
        ("ring", "NotImplementedError", "'ring' computes what 'split_gather' does"),
        ("layers", "ValueError", "tp_size=1"),
        ("sequences", "NotImplementedError", "does not go with sp_size=2"),
    ],
)
def test_what_cannot_be_sharded_is_named(what: str, kind: str, part: str, refused: Any) -> None:
    assert_said((of_rank[what] for of_rank in refused), f"{kind}: ", part)


def test_the_model_works_on_after_an_error(refused: Any) -> None:
    first, second = (rank["works"] for rank in refused)
    assert first == second
    assert first == pytest.approx(plain(FAMILIES["llama"], 1), rel=LOSS)


def test_hidden_states_written_after_a_layer_took_them_are_named(tmp_path: Path) -> None:
    said = found(split_gather_cases.written_in_place, 2, tmp_path)
    assert said.startswith("RuntimeError: hidden states of shape (2, 12, 48)")
