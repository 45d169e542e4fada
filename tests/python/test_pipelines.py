"""Models in stages on several ranks: what they compute, save and refuse."""

import json
import operator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import pipeline_cases
from encoder_stage_cases import FAMILIES as ENCODER_DECODERS
from helpers import GIB
from pages import ROOT
from pipeline_cases import (
    COMPOSED,
    COUNTS,
    DEEP,
    FAMILIES_WITH_STAGES,
    IN_LITTLE,
    OF_A_V,
    PRECISIONS,
    SAVED,
    SCHEDULED,
    SETTINGS,
    SOME_WITH_STAGES,
    STAGED,
    accumulate,
    batch,
    plain,
    train_whole,
)
from rank_processes import assert_said, found, found_by_each, run
from saved_by_ranks import loaded_by_one
from tensor_cases import EXPERTS, FAMILIES, GATHERED, LOSS, LR, MAX_NORM, SEQUENCES, SIZES
from tensor_cases import boost as boost_unsharded
from zoo import Case, gpt2_with_dropout


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(pipeline_cases.families, 2, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("name", SOME_WITH_STAGES)
def test_losses_are_plain_pytorchs(name: str, families: Any) -> None:
    losses, shares = families[name]
    assert losses == pytest.approx(plain(STAGED[name]), rel=LOSS)
    assert max(shares) < 0.75
    assert 1 <= sum(shares) < 1.25  # what is tied is on both


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(pipeline_cases.schedules, 2, tmp_path_factory.mktemp("schedules"))


@pytest.mark.parametrize("scheduled", SCHEDULED)
def test_losses_of_each_schedule_are_plain_pytorchs(scheduled: str, schedules: Any) -> None:
    case = pipeline_cases.of_four_blocks(STAGED[scheduled.split()[0]])
    assert schedules[scheduled] == pytest.approx(plain(case), rel=LOSS)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(pipeline_cases.settings, 2, tmp_path_factory.mktemp("settings"))


def expected(name: str) -> list[float]:
    return plain(DEEP[name])


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_change_nothing(setting: str, settings: Any) -> None:
    name = setting.split()[0]
    assert settings[setting] == settings[f"{name} 1f1b"]
    assert settings[setting] == pytest.approx(expected(name), rel=LOSS)


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(pipeline_cases.composed, 4, tmp_path_factory.mktemp("composed"))


@pytest.mark.parametrize("kind", COMPOSED)
def test_stages_go_with_shards_and_replicas(kind: str, composed: Any) -> None:
    name = kind.split()[0]
    whole = expected(name) if name in DEEP else plain(FAMILIES[name])
    assert composed[kind] == pytest.approx(whole, rel=LOSS)


def test_stages_of_context_parallel_ranks_are_evaluated_in_full(composed: Any) -> None:
    assert composed["gpt2 evaluated"] == pytest.approx(composed["gpt2 whole"], rel=LOSS)
    assert composed["gpt2 own loss"] == pytest.approx(expected("gpt2")[0], rel=LOSS)
    assert composed["odd"].startswith(
        "UsageError: sp_size=2 ranks cannot shard sequences of 22 tokens into 4 pieces"
    )


def test_blocks_of_any_ranks_share_parameters(composed: Any) -> None:
    whole = plain(Case("shared", pipeline_cases._with_shared_blocks, DEEP["llama"].batch))
    assert composed["shared"] == pytest.approx(whole, rel=LOSS)


def test_ranks_of_a_pipeline_take_the_same_data(composed: Any) -> None:
    first, same, second, too = composed["data"]
    assert first == same
    assert second == too
    assert sorted(reduce(operator.iadd, first + second, [])) == list(range(8))


@pytest.fixture(scope="module")
def zero_bubble(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(pipeline_cases.zero_bubble, 2, tmp_path_factory.mktemp("zero_bubble"))


@pytest.mark.parametrize("name", OF_A_V)
def test_weights_gradients_that_come_later_are_the_same(name: str, zero_bubble: Any) -> None:
    losses = zero_bubble[f"{name} ample"]
    assert losses == pytest.approx(plain(OF_A_V[name], len(losses)), rel=LOSS)
    if name != "gpt2":  # whose tied embedding's gradient is summed in another order
        assert losses == zero_bubble[f"{name} interleaved"]
    for setting in IN_LITTLE:
        if setting.startswith(f"{name} "):
            assert zero_bubble[setting] == losses


def test_backward_comes_to_modules_for_their_inputs_and_for_their_weights(zero_bubble: Any) -> None:
    first, between = zero_bubble["llama entered"]
    assert first >= 1  # the first stage has one pass, and the output embedding's function as well
    assert between >= 2


def test_in_a_v_logits_are_tiled(zero_bubble: Any) -> None:
    assert zero_bubble["tiled"] == pytest.approx(expected("gpt2"), rel=LOSS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_in_a_v_reduced_precisions_are_close(precision: str, zero_bubble: Any) -> None:
    assert zero_bubble[precision] == pytest.approx(expected("gpt2"), rel=1e-3)


@pytest.fixture(scope="module")
def composed_zero_bubble(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(pipeline_cases.composed_zero_bubble, 4, tmp_path_factory.mktemp("composed_v"))


@pytest.mark.parametrize("count", COUNTS)
def test_a_v_takes_any_number_of_microbatches(count: int, composed_zero_bubble: Any) -> None:
    assert composed_zero_bubble[f"pp 4, {count}"] == composed_zero_bubble[f"gpipe, {count}"]


@pytest.mark.parametrize("name", pipeline_cases.COMPOSED_V)
def test_a_v_goes_with_shards_and_replicas(name: str, composed_zero_bubble: Any) -> None:
    for kind in ("tp 2", "dp 2"):
        assert composed_zero_bubble[f"{name} {kind}"] == pytest.approx(expected(name), rel=LOSS)
    later, again = composed_zero_bubble[f"{name} later"]
    assert later == pytest.approx(again, rel=LOSS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("saved")
    return directory, found(pipeline_cases.saved, 2, directory)


@pytest.mark.parametrize("name", SAVED)
def test_what_stages_save_is_what_one_process_saves(name: str, saved: Any, tmp_path: Path) -> None:
    directory, later = saved
    case = FAMILIES[name]
    boosted = loaded_by_one(case, directory, name, tmp_path, **SAVED[name])
    losses = train_whole(case, boosted, range(3, 6))
    assert losses == pytest.approx(later[name], rel=1e-3 if name == "llama" else LOSS)


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(pipeline_cases.uses, 2, tmp_path_factory.mktemp("uses"))


@pytest.mark.parametrize("style", ["1f1b", "interleaved", "zbv"])
def test_a_model_in_stages_is_evaluated(style: str, uses: Any) -> None:
    case = DEEP["gpt2"]
    model, whole = case.model(), batch(case, 0)
    with torch.no_grad():
        outputs = model(**whole)
    assert uses[f"{style} evaluated"] == pytest.approx(outputs.loss.item(), rel=1e-6)
    assert torch.allclose(torch.tensor(uses[f"{style} logits"]), outputs.logits, atol=1e-5)
    assert uses[f"{style} afterwards"] == pytest.approx(plain(case, 2), rel=LOSS)


@pytest.mark.smoke
@pytest.mark.parametrize("style", ["1f1b", "interleaved", "zbv"])
def test_batches_accumulate(style: str, uses: Any) -> None:
    """Of two lengths, with a loss of the user's; a tied embedding's gradient counts once."""
    case = DEEP["gpt2"]
    boosted = boost_unsharded(case, 1)
    train_whole(case, boosted, range(2))
    for seed, length in ((0, 24), (1, 16)):
        cut = {name: value[:, :length] for name, value in batch(case, seed).items()}
        accumulate(boosted, cut, pipeline_cases._own_loss)
    norms = []
    for _ in range(2):
        boosted.optimizer.step()
        norms.append(boosted.report().gradient_norm)
    accumulate(boosted, batch(case, 2))
    boosted.optimizer.step()
    norms.append(boosted.report().gradient_norm)
    names = ("norm", "same norm", "more norm")
    assert [uses[f"{style} {name}"] for name in names] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_reduced_precisions_are_close(precision: str, uses: Any) -> None:
    assert uses[precision] == pytest.approx(expected("gpt2"), rel=1e-3)


def test_dropout_is_drawn(uses: Any) -> None:
    case = gpt2_with_dropout()
    assert uses["dropout"] != pytest.approx(plain(case, 3), rel=1e-6)
    assert uses["dropout"] == pytest.approx(plain(case, 3), rel=1e-2)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(pipeline_cases.refused, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("call", "UsageError", "use booster.execute_pipeline(data_iter, model, criterion"),
        ("block before", "NotImplementedError", "takes 'prev_topk_indices' of the one before"),
        ("state_dict", "UsageError", "booster.save_model, or booster.save, on all ranks"),
        ("copy", "UsageError", "a copy would lack them"),
        ("resize", "UsageError", "resize_token_embeddings() would change a LlamaForCausalLM"),
        ("pickle", "UsageError", "a pickle would lack them"),
        ("rows", "UsageError", "3 rows cannot be divided evenly by num_microbatches=4"),
        ("no rows", "UsageError", "a batch of 0 rows cannot be divided"),
        ("no mapping", "TypeError", "the batch is a Tensor"),
        ("empty", "UsageError", "holds no tensor"),
        ("inputs", "UsageError", "differ in the inputs of LlamaForCausalLM"),
        ("gradients", "UsageError", "differ in whether there are gradients: True and False"),
        ("criterion", "UsageError", "differ in whether there is a criterion: False and True"),
        ("part", "UsageError", "this LlamaModel is a part of, and it was called by itself"),
        ("part, evaluated", "UsageError", "call the model under torch.no_grad() on all ranks"),
        ("no loss", "UsageError", "there is no loss"),
        ("layers", "UsageError", "num_layers_per_stage=[1, 2] is of 2 stages and 3 blocks"),
        ("no block", "UsageError", "[2, 0] leaves a stage without a block"),
        ("blocks", "UsageError", "2 blocks, too few for 4 stages"),
        ("quantised", "UsageError", "q_proj.weight' is quantised"),
        ("seed", "UsageError", "differ in the random states"),
        ("state", "UsageError", "states of the full model"),
        ("ranks", "UsageError", "pp_size=3 needs a multiple of 3 ranks, and 2 ranks"),
        ("whole", "UsageError", "nothing says how batches"),
    ],
)
def test_what_does_not_go_with_stages_is_named_on_every_rank(
    what: str, kind: str, part: str, refused: Any
) -> None:
    assert_said((of_rank[what] for of_rank in refused), kind, part)


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("no scalar", "TypeError", "the criterion gave a loss of shape (2, 24); let it give"),
        ("number", "TypeError", "the criterion gave a loss float; let it give a tensor"),
        ("detached", "UsageError", "the loss has no gradient: compute it of the outputs"),
    ],
)
def test_what_a_criterion_gives_is_checked(what: str, kind: str, part: str, refused: Any) -> None:
    first, last = (of_rank[what] for of_rank in refused)
    assert last.startswith(kind)
    assert part in last
    assert part in first
    assert first.startswith("Error: rank 1 of 2 of the pipeline has failed")


def test_the_model_works_after_each_refusal(refused: Any) -> None:
    assert refused[0]["works"] == refused[1]["works"]


@pytest.mark.parametrize(
    ("given", "error", "part"),
    [
        ({"pp_size": 0}, ValueError, "pp_size is 0"),
        ({"pp_size": 2}, ValueError, "num_microbatches or microbatch_size"),
        ({"pp_size": 2, "num_microbatches": 4, "microbatch_size": 1}, ValueError, "not both"),
        ({"pp_size": 2, "num_microbatches": "4"}, TypeError, "num_microbatches is '4'"),
        ({"pp_size": 2, "num_microbatches": 1}, ValueError, "num_microbatches=1 is less"),
        ({"pp_size": 2, "num_microbatches": 3, "pp_style": "interleaved", "num_model_chunks": 2},
         ValueError, "no multiple of pp_size=2"),
        ({"pp_size": 2, "num_microbatches": 2, "pp_style": "zigzag"}, ValueError, "'zigzag'"),
        ({"pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 1},
         ValueError, "num_model_chunks=2"),
        ({"pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 3},
         ValueError, "num_model_chunks=2"),
        ({"pp_size": 2, "num_microbatches": 2, "pp_style": "interleaved", "num_model_chunks": 1},
         ValueError, "contradict"),
        ({"pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 2,
          "activations": "recompute"}, NotImplementedError, "activations='recompute'"),
        ({"pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 2,
          "activations": {"*.0": "offload+tile:2"}}, NotImplementedError, "'offload.tile:2'"),
        ({"pp_size": 2, "num_microbatches": 2, "num_model_chunks": 2}, ValueError, "contradict"),
        ({"num_model_chunks": 2}, ValueError, "num_model_chunks splits stages"),
        ({"num_layers_per_stage": [2]}, ValueError, "num_layers_per_stage splits stages"),
        ({"pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 2,
          "activations": "auto"}, NotImplementedError, "activations='auto'"),
    ],
)  # fmt: skip
def test_arguments_are_checked(given: dict[str, Any], error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part.replace("'", ".")):
        castor.HybridParallelPlugin(device="cpu", **given)


@pytest.mark.parametrize(
    ("given", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zbv", 2)]
)
def test_a_style_has_the_stages_of_a_rank_that_it_needs(given: str, chunks: int) -> None:
    plugin = castor.HybridParallelPlugin(
        device="cpu", pp_size=2, num_microbatches=2, pp_style=given
    )
    assert plugin._parallel_config.stages is not None
    assert plugin._parallel_config.stages.chunks == chunks
    alone = castor.HybridParallelPlugin(device="cpu", num_microbatches=2, pp_style=given)
    assert alone._parallel_config.stages is not None
    assert alone._parallel_config.stages.chunks == 1


@pytest.mark.parametrize("given", [{"num_microbatches": 4}, {"microbatch_size": 2}])
def test_one_stage_runs_the_same_loop(given: dict[str, int]) -> None:
    case = DEEP["gpt2"]
    boosted = boost_unsharded(case, 1, **given)
    execute = boosted.booster.execute_pipeline
    with torch.no_grad():
        done = execute(iter([batch(case, 0)]), boosted.model, return_outputs=True)
    assert [len(one.logits) for one in done["outputs"]] == [2] * 4
    assert pipeline_cases.train(case, boosted) == pytest.approx(expected("gpt2"), rel=LOSS)
    with pytest.raises(TypeError, match="the batch is a Tensor"):
        execute(iter([torch.zeros(1)]), boosted.model)


def test_one_process_is_told_how_to_start_more() -> None:
    model = FAMILIES["llama"].model()
    booster = castor.Booster(
        castor.HybridParallelPlugin(
            device="cpu", device_memory=GIB, max_norm=MAX_NORM, pp_size=2, num_microbatches=2
        )
    )
    with pytest.raises(castor.UsageError, match=r"pp_size=2 .* this process is alone: .*--nproc 2"):
        booster.boost(model, torch.optim.AdamW(model.parameters(), lr=LR))


@pytest.mark.parametrize(
    ("phase", "size"), [("forward", 2), ("backward", 4), ("weights", 2), ("save", 2)]
)
def test_a_rank_that_dies_is_named(
    phase: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASE", phase)
    outcomes = run(pipeline_cases.one_dies, size, tmp_path, timeout=60)
    assert [outcome.code for outcome in outcomes] == [0, -9, *[0] * (size - 2)]
    for rank in {*range(size)} - {1}:
        message, seconds = json.loads((tmp_path / f"one_dies{rank}.json").read_text())
        assert "rank 1 (process" in message
        assert seconds < 20


@pytest.mark.parametrize(
    ("phase", "size", "neighbours"),
    [
        pytest.param("forward", 2, "", marks=pytest.mark.whole),
        *(("criterion", 2, ""), ("backward", 4, ""), ("weights", 2, "")),
        *(("forward", 4, "tp_size"), ("forward", 4, "sp_size")),
    ],
)
def test_a_rank_that_fails_and_lives_on_is_waited_for_by_none(
    phase: str, size: int, neighbours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASE", phase)
    monkeypatch.setenv("NEIGHBOURS", neighbours)
    for rank, (first, *later) in enumerate(found_by_each(pipeline_cases.one_fails, size, tmp_path)):
        name, message, seconds = first
        if rank == 1:
            assert (name, message) == ("ValueError", "no more")
        else:
            assert name == "Error"
            assert "no more" in message or "let go" in message
        if not neighbours and rank != 1:
            cause = f"rank 1 of {size} of the pipeline has failed: ValueError: no more; mend that"
            assert message.startswith(cause)
        assert seconds < 20
        assert len(later) == 2  # another step, and a save
        for name, message, _ in later:
            assert name == "UsageError"
            assert "have let go of each other when a step failed" in message


def test_the_guides_table_is_of_what_is_tested() -> None:
    text = (ROOT / "docs" / "guides" / "hybrid-parallel.md").read_text()
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.count("|") == 8]
    stated = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines[2:]}
    among_all = {*GATHERED} - {"windows", "eager", "three_heads", "sinks", "mask_by_name"}
    among_all |= {"gpt_oss"}
    tested = [set(SIZES[2]) - {"falcon_groups"}, {*EXPERTS} - {"router_loss", "grouped"},
              {*SEQUENCES} - {"windows", "eager"}, among_all, among_all,
              {*FAMILIES_WITH_STAGES, *ENCODER_DECODERS} - {"untied"}]  # fmt: skip
    assert set(stated) == set().union(*tested)
    for family, cells in stated.items():
        assert cells == ["x" if family in those else "" for those in tested], family


def test_even_cuts_make_the_dearest_stage_cheap() -> None:
    from castor.distributed.pipeline_plan import even_cuts

    assert even_cuts([1, 1, 1, 1], 0, 2) == [2, 2]
    assert even_cuts([1, 1, 1, 1], 2, 2) == [3, 1]
    assert even_cuts([1] * 4, 9, 2) == [3, 1]  # each has one
    assert even_cuts([3, 1, 1, 1, 1, 1], 0, 3) == [1, 2, 3]
    assert even_cuts([1, 2, 3], 0, 1) == [3]
