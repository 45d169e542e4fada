"""Ranks that divide sequences: what they compute, and what they refuse."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import castor
import tensor_cases
from rank_processes import assert_said, found, found_by_each, of_sizes
from tensor_cases import (
    FAMILIES,
    GATHERED,
    LOSS,
    PACKED,
    SOME_GATHERED,
    SOME_IN_RINGS,
    SOME_SEQUENCES,
    SOME_SETTINGS,
    begun_behind_padding,
    packed,
    padded,
    padded_in_front,
    plain,
)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return of_sizes(tensor_cases.divided_sequences, tmp_path_factory)


def _pairs(of_sizes: dict[int, Any]) -> list[tuple[int, str]]:
    return [(size, name) for size, names in of_sizes.items() for name in names]


@pytest.mark.parametrize(("size", "name"), _pairs(SOME_SEQUENCES))
def test_losses_of_padded_batches_are_plain_pytorchs(size: int, name: str, divided: Any) -> None:
    expected = plain(FAMILIES[name], batch=padded)
    assert divided(size)["heads"][name] == pytest.approx(expected, rel=LOSS)


def test_positions_that_a_model_counts_by_the_mask_are_those_of_all_tokens(divided: Any) -> None:
    expected = plain(FAMILIES["opt"], batch=padded_in_front)
    assert divided(2)["heads"]["in front"] == pytest.approx(expected, rel=LOSS)


@pytest.mark.parametrize(("size", "name"), _pairs(SOME_GATHERED))
def test_losses_with_gathered_keys_are_plain_pytorchs(size: int, name: str, divided: Any) -> None:
    expected = plain(GATHERED[name], batch=padded)
    assert divided(size)["keys"][name] == pytest.approx(expected, rel=LOSS)


def test_batches_without_a_mask_are_causal_on_every_rank(divided: Any) -> None:
    for size, name in ((2, "sinks"), (4, "three_heads")):
        expected = plain(GATHERED[name], 3)
        assert divided(size)["keys"]["unpadded"] == pytest.approx(expected, rel=LOSS)


@pytest.fixture(scope="module")
def rings(divided: Any) -> Any:
    return lambda size: divided(size)["rings"]


@pytest.mark.parametrize(("size", "name"), _pairs(SOME_IN_RINGS))
def test_losses_with_travelling_keys_are_plain_pytorchs(size: int, name: str, rings: Any) -> None:
    expected = plain(GATHERED[name], batch=padded)
    assert rings(size)["padded"][name] == pytest.approx(expected, rel=LOSS)


@pytest.mark.parametrize(("size", "mode"), _pairs(PACKED))
def test_packed_documents_do_not_see_each_other(size: int, mode: str, rings: Any) -> None:
    expected = plain(FAMILIES["windows"], batch=packed)
    assert rings(size)["packed"][mode] == pytest.approx(expected, rel=LOSS)


def test_rings_go_with_budgets_replicas_and_tensor_parallelism(rings: Any) -> None:
    expected = plain(FAMILIES["llama"])
    for size, kinds in ((2, ("unpadded",)), (4, ("unpadded", "copies", "layers too"))):
        for kind in kinds:
            assert rings(size)[kind] == pytest.approx(expected, rel=LOSS), kind
    assert rings(2)["own loss"] == pytest.approx(expected[:3], rel=LOSS)
    assert rings(2)["hidden"] == [True, True, True]
    assert rings(2)["criterion"] == pytest.approx(expected[0], rel=LOSS)


def test_rings_drop_weights_of_attention(rings: Any) -> None:
    with_dropout = rings(2)["dropout"]
    without = plain(FAMILIES["gpt2"], 4, batch=padded)
    assert with_dropout == pytest.approx(without, rel=0.1)
    assert with_dropout != pytest.approx(without, rel=1e-3)


def test_nobody_in_a_ring_has_the_keys_of_all_tokens(rings: Any) -> None:
    lengths = rings(2)["lengths"]
    assert lengths["ring_attn"] == lengths["padded"] == []
    assert len(lengths["all_gather"]) > 0  # it would be seen


@pytest.mark.parametrize("size", [2, 4])
def test_settings_and_other_parallelism_change_nothing(size: int, tmp_path: Path) -> None:
    losses = found(tensor_cases.sequence_settings, size, tmp_path)
    case = FAMILIES["llama"]
    expected = plain(case)
    names = SOME_SETTINGS[size].keys() - ({"two"} if size == 2 else set())
    for name in names:
        assert losses[name] == pytest.approx(expected, rel=LOSS), name
    assert losses["own loss"] == pytest.approx(expected[:3], rel=LOSS)
    # What was saved or copied is a model like any other, and generates what the ranks did.
    ids = case.batch(0)["input_ids"]
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        pickle.loads((tmp_path / "pickled").read_bytes()),
    ):
        generated = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert losses["generated"] == generated.tolist()


@pytest.mark.smoke
def test_a_rank_has_its_share_of_the_activations(tmp_path: Path) -> None:
    peaks = found(tensor_cases.activation_bytes, 2, tmp_path)
    assert peaks["sequences"] < 0.53 * peaks["whole"]  # all of them, but the batch
    assert peaks["ring"] < 0.53 * peaks["whole"]
    assert peaks["layers"] < 0.85 * peaks["whole"]  # inputs of norms and logits are whole
    assert peaks["loss too"] < 0.7 * peaks["whole"]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(tensor_cases.sequences_refused, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("t5", "NotImplementedError", "does not go through transformers' registry"),
        ("bert", "NotImplementedError", "no decoder"),
        ("bloom", "NotImplementedError", "registry"),
        ("falcon", "NotImplementedError", "registry"),
        ("vit", "NotImplementedError", "no decoder"),
        ("odd", "UsageError", "sequences of 23 tokens; pad them to 24"),
        ("packed", "UsageError", "use_cache=False"),
        ("positions", "NotImplementedError", "position_ids of shape (batch, tokens)"),
        ("mask", "NotImplementedError", "attention_mask of shape (batch, tokens)"),
        ("argument", "NotImplementedError", "'kept_tokens'"),
        ("attentions", "NotImplementedError", "call the model under torch.no_grad()"),
        ("inputs", "UsageError", "differ in the inputs of LlamaForCausalLM"),
        ("saves", "UsageError", "rank 1 at a save"),
        ("steps", "UsageError", "rank 1 at a step: ranks with shards"),
        ("part", "UsageError", "LlamaModel was called by itself: call the model, or this under"),
        ("heads", "NotImplementedError", "3 attention heads"),
        ("attention", "NotImplementedError", "its attn_implementation is 'flex_attention'"),
        ("conv", "NotImplementedError", "layers of type 'conv' mix tokens outside of attention"),
        ("roberta", "NotImplementedError", "from where its input_ids are no padding"),
        ("mode", "NotImplementedError", "'ring'"),
        ("pieces", "UsageError", "sequences of 22 tokens into 4 pieces; pad them to 24"),
        ("bias", "NotImplementedError", "position_bias"),
        ("option", "NotImplementedError", "LlamaAttention gives its attention 'tilt'"),
        ("blind", "UsageError", "token 1 of row 0 is padding that sees no token"),
        ("blind, own loss", "UsageError", "token 0 of row 0 is padding that sees no token"),
        ("own mask", "NotImplementedError", "a mask that transformers has not made"),
    ],
)
def test_what_cannot_be_divided_is_named_on_every_rank(
    what: str, kind: str, part: str, refused: Any
) -> None:
    assert_said((of_rank[what] for of_rank in refused), kind, part)


def test_a_submodule_called_without_gradients_computes_full_sequences(refused: Any) -> None:
    model: Any = FAMILIES["llama"].model()
    with torch.no_grad():
        whole = model.model(input_ids=FAMILIES["llama"].batch(0)["input_ids"]).last_hidden_state
    for of_rank in refused:
        for name in ("of a part", "of a part, ring"):
            assert torch.allclose(torch.tensor(of_rank[name]), whole, atol=1e-5), name


def test_the_model_works_after_each_refusal(refused: Any) -> None:
    first = plain(FAMILIES["llama"], 1)
    for attention in ("works", "ring works"):
        losses = [of_rank[attention] for of_rank in refused]
        assert losses[0] == losses[1] == pytest.approx(first, rel=LOSS)
    again = plain(FAMILIES["eager"], 1)
    for of_rank in refused:
        assert of_rank["other attention"] == pytest.approx(again, rel=LOSS)
    behind = plain(FAMILIES["eager"], 1, batch=begun_behind_padding)
    for of_rank in refused:
        assert of_rank["blind, ignored"] == pytest.approx(behind, rel=LOSS)


@pytest.mark.parametrize(
    ("given", "error", "part"),
    [
        ({"sp_size": 0}, ValueError, "sp_size is 0"),
        ({"sp_size": None}, TypeError, "sp_size is None"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        castor.HybridParallelPlugin(device="cpu", **given)
