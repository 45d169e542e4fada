"""Ranks that divide the experts of one model: what they compute, save and refuse."""

from pathlib import Path
from typing import Any

import pytest

import castor
import tensor_cases
from rank_processes import found, found_by_each
from tensor_cases import EXPERT_SETTINGS, EXPERTS, LOSS, boost, plain, train


@pytest.fixture(scope="module", params=[2, 3])
def families(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    size: int = request.param
    return size, found(tensor_cases.experts, size, tmp_path_factory.mktemp(f"experts{size}"))


@pytest.mark.parametrize("name", EXPERTS)
def test_losses_are_plain_pytorchs(name: str, families: Any) -> None:
    size, seen = families
    losses, own = seen[name]
    assert losses == pytest.approx(plain(EXPERTS[name]), rel=LOSS)
    model = EXPERTS[name].model()
    sizes = {key: param.numel() for key, param in model.named_parameters()}
    of_experts = sum(numel for key, numel in sizes.items() if ".experts." in key)
    [count] = {one.num_experts for key, one in model.named_modules() if key.endswith(".experts")}
    mine = -(-count // size)  # of rank 0, which has one more where they are no multiple
    assert own == sum(sizes.values()) - of_experts + of_experts * mine // count


@pytest.mark.parametrize("size", [2, 4])
def test_settings_and_files_change_nothing(size: int, tmp_path: Path) -> None:
    seen = found(tensor_cases.expert_settings, size, tmp_path)
    case = EXPERTS["mixtral"]
    expected = plain(case)
    later = seen.pop("later")
    assert set(seen) == (
        set(EXPERT_SETTINGS) - {"sequences too"} | {"tight", "NVMe"}
        if size == 2
        else set(EXPERT_SETTINGS)
    )
    for name, losses in seen.items():
        assert losses == pytest.approx(expected, rel=LOSS), name
    if size == 2:
        assert seen["tight"] == seen["NVMe"] == seen["plain"] == seen["lazy"]
    # One process goes on with it, and writes the same bytes.
    alone = boost(case)
    alone.booster.load(tmp_path / "run", alone.model, alone.optimizer)
    alone.booster.save(tmp_path / "again", alone.model, alone.optimizer)
    for part in ("model/model", "optimizer/optimizer"):
        first, again = (
            tmp_path / name / "step-00000003" / f"{part}.safetensors" for name in ("run", "again")
        )
        assert first.read_bytes() == again.read_bytes()
    if size == 2:
        assert train(case, alone, 3, 3) == pytest.approx(later, rel=LOSS)


def test_experts_that_no_token_chose_decay_as_in_plain_pytorch(tmp_path: Path) -> None:
    *losses, [far, _] = found(tensor_cases.unchosen_experts, 2, tmp_path)
    for mine, expected in losses:
        assert mine == pytest.approx(expected, rel=LOSS)
    assert far < 1e-5


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("none", "UsageError", "ep_size=2 divides experts, and this LlamaForCausalLM has no"),
        ("few", "UsageError", "has 1 experts, too few for ep_size=2"),
        ("list", "NotImplementedError", "'experts' is a ModuleList, whose experts castor cannot"),
        ("ranks", "UsageError", "ep_size=3 needs a multiple of 3 ranks, and 2 ranks"),
        ("muon", "NotImplementedError", "with ep_size=2 a RMSprop would step parts of matrices"),
    ],
)
def test_what_cannot_be_divided_is_named_on_every_rank(
    what: str, kind: str, part: str, refused: Any
) -> None:
    for of_rank in refused:
        assert of_rank[what].startswith(kind)
        assert part in of_rank[what]
        assert of_rank["works"] == refused[0]["works"]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(tensor_cases.experts_refused, 2, tmp_path_factory.mktemp("refused"))


def test_layers_and_experts_are_divided_among_the_same_ranks() -> None:
    with pytest.raises(NotImplementedError, match="ep_size=2 does not go with tp_size=4"):
        castor.HybridParallelPlugin(device="cpu", tp_size=4, ep_size=2)
