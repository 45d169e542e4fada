"""Ranks that divide the layers of one model: what they compute, save and refuse."""

import json
import operator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import tensor_cases
from castor.distributed import ModelParallelGroup
from castor.distributed.inputs import by_name
from rank_processes import assert_said, found, found_by_each, of_sizes, run
from saved_by_ranks import loaded_by_one
from tensor_cases import (
    FAMILIES,
    LOSS,
    LOSSES_DIVIDED,
    SAVED,
    SOME_SIZES,
    STEPS,
    WITH_COPIES,
    WITH_SETTINGS,
    boost,
    padded,
    plain,
    train,
)
from zoo import LENGTH, VOCABULARY


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return of_sizes(tensor_cases.families, tmp_path_factory)


@pytest.mark.parametrize(
    ("size", "name"), [(n, name) for n, names in SOME_SIZES.items() for name in names]
)
def test_losses_are_plain_pytorchs(size: int, name: str, families: Any) -> None:
    losses, share = families(size)[name]
    assert losses == pytest.approx(plain(FAMILIES[name]), rel=LOSS)
    assert share < 1 / size + 0.12  # norms, positions and routers are whole


def test_settings_change_nothing(tmp_path: Path) -> None:
    losses = found(tensor_cases.settings, 2, tmp_path)
    for name in WITH_SETTINGS:
        first, *others = losses.pop(name)
        assert first == pytest.approx(plain(FAMILIES[name]), rel=LOSS)
        assert all(other == first for other in others)
    for name, reduced in losses.items():
        assert reduced == pytest.approx(plain(FAMILIES[name.partition(" ")[0]]), rel=1e-3), name


def test_copies_of_the_model_take_other_data(tmp_path: Path) -> None:
    seen = found(tensor_cases.data_too, 4, tmp_path)
    for name in WITH_COPIES:
        assert seen[name] == pytest.approx(plain(FAMILIES[name]), rel=LOSS)
        first, same, second, too = seen[f"{name} data"]
        assert first == same
        assert second == too
        assert sorted(reduce(operator.iadd, first + second, [])) == list(range(8))


@pytest.mark.smoke
@pytest.mark.parametrize("size", [2, 4])
def test_the_loss_may_be_vocabulary_parallel(size: int, tmp_path: Path) -> None:
    """On four ranks sequences are divided as well."""
    seen = found(tensor_cases.vocab_parallel_loss, size, tmp_path)
    for name in LOSSES_DIVIDED[size]:
        case = FAMILIES[name]
        assert seen[name] == pytest.approx(plain(case, batch=padded), rel=LOSS)
    assert seen["llama bf16"] == pytest.approx(seen["llama"], rel=1e-3)
    assert seen["criterion"] == pytest.approx(plain(FAMILIES["llama"], 3), rel=LOSS)
    assert seen["logits"] == [2, LENGTH, VOCABULARY]
    assert "ForMaskedLMLoss" in seen["bert"]
    assert "leaves it unsharded" in seen["no head"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("saved")
    return directory, found(tensor_cases.saved, 2, directory)


@pytest.mark.parametrize("name", SAVED)
def test_what_ranks_save_is_what_one_process_saves(name: str, saved: Any, tmp_path: Path) -> None:
    directory, later = saved
    case = FAMILIES[name]
    boosted = loaded_by_one(case, directory, name, tmp_path, **SAVED[name])
    close = 1e-3 if name == "llama" else LOSS
    assert train(case, boosted, 3, 3) == pytest.approx(later[name], rel=close)


def test_a_run_of_one_process_goes_on_on_two(tmp_path: Path) -> None:
    case = FAMILIES["llama"]
    alone = boost(case, 1)
    train(case, alone, 0, 3)
    alone.booster.save(tmp_path / "run", alone.model, alone.optimizer)
    losses = found(tensor_cases.loaded, 2, tmp_path)
    assert losses == pytest.approx(train(case, alone, 3, 3), rel=LOSS)
    for part in ("model/model", "optimizer/optimizer"):
        first, again = (
            tmp_path / name / "step-00000003" / f"{part}.safetensors" for name in ("run", "again")
        )
        assert first.read_bytes() == again.read_bytes()


def test_a_sharded_model_generates_and_evaluates(tmp_path: Path) -> None:
    seen = found(tensor_cases.uses, 2, tmp_path)
    case = FAMILIES["llama"]
    boosted = boost(case, 1)
    ids = case.batch(0)["input_ids"]
    generated = boosted.model.generate(  # type: ignore[operator]
        ids, max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert seen["generated"] == generated.tolist()
    with torch.no_grad():
        logits = boosted.model(input_ids=ids).logits
    assert torch.allclose(torch.tensor(seen["logits"]), logits.cpu(), atol=1e-5)
    for seed in range(2):
        batch = case.batch(seed)
        boosted.booster.backward(case.loss(boosted.model(**batch), batch) / 2, boosted.optimizer)
    boosted.optimizer.step()
    assert seen["norm"] == pytest.approx(boosted.report().gradient_norm, rel=1e-6)
    assert seen["attentions"] == [True, True]
    # Two a layer, of two and three, and one for embeddings; back as many: q, k and v share one.
    assert seen["sums"] == [[5, 5], [7, 7]]


@pytest.mark.smoke
def test_a_users_plan_shards_a_users_model(tmp_path: Path) -> None:
    alone, together = found(tensor_cases.own_plan, 2, tmp_path)
    assert together == pytest.approx(alone, rel=LOSS)
    assert len(alone) == STEPS


def test_a_norm_of_a_ranks_shard_is_not_taken_for_the_models(tmp_path: Path) -> None:
    for said in found_by_each(tensor_cases.edits, 2, tmp_path):
        for name in ("llama", "mixtral"):
            assert "was edited in place, and ranks shard this model" in said[f"clipped {name}"]
            assert "clip with the plugin's max_norm" in said[f"clipped {name}"]
        assert said["clipped whole gradients"] == "nothing"


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(tensor_cases.refused, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("copy", "UsageError", "booster.save_model writes the full one"),
        ("pickle", "UsageError", "has shards of this model only"),
        ("state_dict", "UsageError", "booster.save_model, or booster.save, on all ranks"),
        ("resize", "UsageError", "resize_token_embeddings() would change a LlamaForCausalLM"),
        ("inputs", "UsageError", "differ in the inputs of LlamaForCausalLM"),
        (
            "places",
            "UsageError",
            "rank 1 at what ranks tell each other between passes (a step, a save)",
        ),
        ("tokens", "IndexError", "of a vocabulary of 256 tokens; give numbers from 0 to 255"),
        ("no token", "IndexError", "input_ids from -2"),
        ("labels", "IndexError", "to 256 are not all of a vocabulary of 256 tokens"),
        ("ranks", "UsageError", "tp_size=3 needs a multiple of 3 ranks, and 2 ranks"),
        ("heads", "UsageError", "3 num_attention_heads"),
        ("key heads", "UsageError", "has 3 key-value heads, which tp_size=2 ranks can neither"),
        ("alibi", "NotImplementedError", "ALiBi"),
        ("no plan", "NotImplementedError", "cannot shard a Tower"),
        ("unknown name", "UsageError", "'model.layer.*'"),
        ("unknown style", "NotImplementedError", "'diagonal'"),
        ("wrong module", "UsageError", "'model.norm' is a LlamaRMSNorm"),
        ("quantised", "UsageError", "'model.layers.1.self_attn.q_proj.weight' is quantised"),
        ("muon", "NotImplementedError", "shards of matrices as if they were full ones"),
        ("state", "UsageError", "states of full parameters"),
        ("int8", "NotImplementedError", "'split_int8'"),
        ("models", "UsageError", "differ in"),
    ],
)
def test_what_does_not_go_with_parts_is_named_on_every_rank(
    what: str, kind: str, part: str, refused: Any
) -> None:
    assert_said((of_rank[what] for of_rank in refused), kind, part)


def test_the_model_works_after_each_refusal(refused: Any) -> None:
    assert refused[0]["works"] == refused[1]["works"]


def test_one_process_is_told_how_to_start_more() -> None:
    with pytest.raises(castor.UsageError, match=r"tp_size=2 .* this process is alone: .*--nproc 2"):
        boost(FAMILIES["llama"], 2)


@pytest.mark.parametrize(
    ("given", "error", "part"),
    [
        ({"tp_size": 0}, ValueError, "tp_size is 0"),
        ({"tp_size": "2"}, TypeError, "tp_size is '2'"),
        ({"tp_size": 2, "tp_plan": ["colwise"]}, TypeError, "tp_plan is a list"),
        ({"parallel_output": True}, ValueError, "parallel_output=True .* with tp_size=1"),
        ({"sp_size": 2, "parallel_output": True}, ValueError, "with tp_size=1 there are none"),
        ({"tp_size": 2, "tile_logits": True}, NotImplementedError, "tile_logits=True"),
        ({"tp_size": 2, "gather_embeddings": True}, NotImplementedError, "gather_embeddings"),
        ({"tp_size": 2, "colour": "red"}, TypeError, "HybridParallelPlugin has no argument"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part.replace("'", ".")):
        castor.HybridParallelPlugin(device="cpu", **given)


def test_one_rank_a_layer_is_gemini() -> None:
    case = FAMILIES["gpt2"]
    assert train(case, boost(case, 1), steps=2) == pytest.approx(plain(case, 2), rel=LOSS)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_extents_are_those_of_tensor_split(size: int) -> None:
    nothing: Any = None
    for length in range(25):
        expected = [part.tolist() for part in torch.arange(length).tensor_split(size)]
        for rank in range(size):
            ranks = ModelParallelGroup(
                rank=rank, size=size, name="", group=nothing, tensors=nothing
            )
            assert list(ranks.shard_range(length)) == expected[rank]
            assert [list(ranks.shard_range(length, of)) for of in range(size)] == expected


def _forward(x: int, scale: int = 1, **others: int) -> None:
    """What arguments are given to."""


def test_arguments_are_known_by_name_however_they_are_given() -> None:
    named = {"x": 1, "scale": 2}
    assert by_name(_forward, (), named) == by_name(_forward, (1,), {"scale": 2}) == named
    assert by_name(_forward, (1, 2), {"more": 3}) == named | {"more": 3}
    for args, given in (((1, 2, 3), {}), ((1,), {"x": 1})):
        with pytest.raises(TypeError):
            by_name(_forward, args, given)


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("tp_size", "backward"),
        ("tp_size", "save"),
        pytest.param("sp_size", "forward", marks=pytest.mark.whole),
        ("sp_size", "step"),
        ("ring_attn", "backward"),
        ("split_gather", "forward"),
        ("split_gather", "backward"),
    ],
)
def test_a_rank_that_dies_is_named(
    kind: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIND", kind)
    monkeypatch.setenv("PHASE", phase)
    first, second = run(tensor_cases.one_dies, 2, tmp_path, timeout=60)
    assert (first.code, second.code) == (0, -9), first.errors
    message, seconds = json.loads((tmp_path / "one_dies0.json").read_text())
    assert "rank 1 (process" in message
    assert seconds < 20
