"""Ranks that divide the experts of one model: what they compute, save and refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

import castor
import expert_cases
from expert_cases import SOME_EXPERTS, SOME_SETTINGS, STYLES, alone
from rank_processes import assert_said, found, found_by_each, of_sizes, run
from tensor_cases import EXPERTS, LOSS, boost
from zoo import LENGTH


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return of_sizes(expert_cases.experts, tmp_path_factory)


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, names in SOME_EXPERTS.items() for name in names]
)
def test_ranks_with_other_data_train_as_one_process_with_their_micro_batches(
    size: int, name: str, families: Any
) -> None:
    losses, own = families(size)[name]
    for step, expected in zip(losses, alone(EXPERTS[name], size), strict=True):
        assert step == pytest.approx(expected, rel=LOSS)
    model = EXPERTS[name].model()
    sizes = {key: param.numel() for key, param in model.named_parameters()}
    of_experts = sum(numel for key, numel in sizes.items() if ".experts." in key)
    [count] = {one.num_experts for key, one in model.named_modules() if key.endswith(".experts")}
    mine = -(-count // size)  # of rank 0, which has one more where they are no multiple
    assert own == sum(sizes.values()) - of_experts + of_experts * mine // count


@pytest.mark.parametrize("size", [2, 4])
def test_settings_and_files_change_nothing(size: int, tmp_path: Path) -> None:
    seen = found(expert_cases.expert_settings, size, tmp_path)
    case = EXPERTS["mixtral"]
    data = seen.pop("data")
    assert sorted(sample for of_rank in data for [batch] in [of_rank] for sample in batch) == list(
        range(2 * size)
    )
    later = seen.pop("later")[1]
    assert set(seen) == {*SOME_SETTINGS[size]} - ({"sequences too"} if size == 2 else set())
    for name, (of, losses) in seen.items():
        for step, all_of in zip(
            losses, alone(case, of, uneven=name != "sequences too"), strict=True
        ):
            sharing = size // of
            expected = (
                [loss for loss in all_of for _ in range(sharing)]
                if name != "sequences too"
                else all_of * sharing
            )
            assert step == pytest.approx(expected, rel=LOSS), name
    for name in seen.keys() & {"tight", "NVMe", "lazy"}:
        assert seen[name] == seen["plain"], name
    # One process goes on with it, and writes the same bytes.
    one = boost(case)
    one.booster.load(tmp_path / "run", one.model, one.optimizer)
    one.booster.save(tmp_path / "again", one.model, one.optimizer)
    for part in ("model/model", "optimizer/optimizer"):
        first, again = (
            tmp_path / name / "step-00000003" / f"{part}.safetensors" for name in ("run", "again")
        )
        assert first.read_bytes() == again.read_bytes()
    for step, expected in zip(later, alone(case, size, 6)[3:], strict=True):
        assert step == pytest.approx(expected, rel=LOSS)


def test_experts_that_no_token_chose_decay_as_in_plain_pytorch(tmp_path: Path) -> None:
    *losses, [far, _] = found(expert_cases.unchosen_experts, 2, tmp_path)
    for mine, expected in losses:
        assert mine == pytest.approx(expected, rel=LOSS)
    assert far < 1e-5


@pytest.mark.parametrize(("size", "link"), [(2, "auto"), (4, "auto"), (4, "group")])
def test_what_some_ranks_have_no_gradient_of_is_averaged_with_zeros(
    size: int, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTOR_RANK_LINK", link)
    seen = found(expert_cases.branches, size, tmp_path)
    for name, (losses, skipped) in seen.items():
        near = {"rel": LOSS} if name not in ("bf16", "fp16") else {"abs": 0.05}
        for mine, expected in zip(losses, seen["plain"][0], strict=True):
            until = 1 if name == "fp16" else None  # then steps are skipped
            assert mine[:until] == pytest.approx(expected[:until], **near), name
        assert (skipped > 0) == (name == "fp16")


@pytest.mark.smoke
@pytest.mark.parametrize("size", [2, 4])
def test_accumulated_gradients_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    for mine, expected in found(expert_cases.accumulated, size, tmp_path).values():
        for of_rank, losses in zip(mine, expected, strict=True):
            assert of_rank == pytest.approx(losses, rel=LOSS)


def test_stages_have_other_micro_batches_on_each_rank(tmp_path: Path) -> None:
    seen = found(expert_cases.staged, 4, tmp_path)
    for style in STYLES:
        for rank, losses in enumerate(seen[style]):
            assert losses == pytest.approx(seen["plain"][rank % 2], rel=LOSS), style
    assert seen["generated"] == [3, 7, 3, 7]


def test_pipelines_of_other_lengths_are_named(tmp_path: Path) -> None:
    heard = found_by_each(expert_cases.pipelines_apart, 4, tmp_path)
    for message, seconds in heard:
        assert message != "nothing"
        assert seconds < 30
    assert any("give all as many batches and micro-batches" in message for message, _ in heard)


def test_rows_alone_go_to_the_ranks_whose_experts_they_chose(tmp_path: Path) -> None:
    sent, expected, exchanges, most = found(expert_cases.exchanged_bytes, 2, tmp_path)
    assert sent == expected
    assert exchanges == 2 * 4  # layers; there and back, of states and of gradients
    assert most <= 2 * LENGTH  # rows of one rank, whatever they choose


def test_each_rank_generates_of_its_own_prompts(tmp_path: Path) -> None:
    seen = found(expert_cases.uses, 2, tmp_path)
    for name in ("greedy", "beams"):
        for mine, theirs in seen[name]:
            assert mine == theirs
    assert seen["far"] < 1e-4
    for step, expected in zip(seen["losses"], alone(EXPERTS["mixtral"], 2, 3), strict=True):
        assert step == pytest.approx(expected, rel=LOSS)


def test_a_rank_that_does_something_else_is_named(tmp_path: Path) -> None:
    seen = found_by_each(expert_cases.apart, 2, tmp_path)
    for of_rank in seen:
        for name, there in {
            "evaluation": ("without gradients", "the forward through"),
            "micro-batches": ("the forward through", "a step"),
            "epochs": ("the forward through", "between passes"),
        }.items():
            message, seconds = of_rank[name]
            assert message.startswith("UsageError: rank 0 is at"), message
            assert all(part in message for part in there)
            assert seconds < 30
        scales = (
            "UsageError: rank 0 and rank 1 differ in the loss scale that their gradients carry: "
        )
        assert of_rank["scales"][0].startswith(scales)


@pytest.mark.parametrize("phase", ["forward", "generate"])
def test_a_dead_rank_is_named(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASE", phase)
    run(expert_cases.one_dies, 2, tmp_path)
    message, seconds = json.loads((tmp_path / "one_dies0.json").read_text())
    assert "rank 1" in message
    assert seconds < 30


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("none", "UsageError", "ep_size=2 shards experts, and this LlamaForCausalLM has no"),
        ("few", "UsageError", "has 1 experts, too few for ep_size=2"),
        ("list", "NotImplementedError", "'experts' is a ModuleList, whose experts castor cannot"),
        ("ranks", "UsageError", "ep_size=3 needs a multiple of 3 ranks, and 2 ranks"),
        ("muon", "NotImplementedError", "with ep_size=2 a RMSprop would step shards of matrices"),
    ],
)
def test_what_cannot_be_divided_is_named_on_every_rank(
    what: str, kind: str, part: str, refused: Any
) -> None:
    assert_said((of_rank[what] for of_rank in refused), kind, part)
    for of_rank in refused:
        assert of_rank["works"] == refused[0]["works"]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(expert_cases.experts_refused, 2, tmp_path_factory.mktemp("refused"))


def test_layers_and_experts_are_sharded_over_the_same_ranks() -> None:
    with pytest.raises(NotImplementedError, match="ep_size=2 does not go with tp_size=4"):
        castor.HybridParallelPlugin(device="cpu", tp_size=4, ep_size=2)
