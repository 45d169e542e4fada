"""activations="auto" where recomputed blocks are too large: pieces, or an error that says why."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import castor
import castor.report
from castor.activations.tight import Pieces
from castor.runtime.engine import engine_of
from helpers import ON_THE_CPU_DEVICE, assert_equal, boost, copies, train_on
from test_auto_activations import longer, step
from test_recomputed_blocks import small
from zoo import Case

MIB = 2**20
BUILDS: dict[str, Callable[[], nn.Module]] = {
    "llama": small(hf.LlamaConfig, num_key_value_heads=2, max_position_embeddings=2048),
    "gpt2": small(
        hf.GPT2Config,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
}


# Of blocks whose attention makes no matrix of scores, which would be more than the rest.
of_the_cpu = pytest.mark.skipif(
    not ON_THE_CPU_DEVICE, reason="the simulated device has no kernel of attention"
)


def case_of(name: str, rows: int = 4, length: int = 256) -> Case:
    return Case(
        name, BUILDS[name], lambda seed: longer(rows, length, seed), lambda out, _: out.loss
    )


def trains(case: Case, budget: int, **settings: Any) -> bool:
    boosted = boost(case.model(), budget, activations="auto", **settings)
    try:
        train_on(boosted, case, steps=2)
    except castor.OutOfMemoryError:
        return False
    return True


def bytes_of(number: str, unit: str) -> int:
    return int(float(number) * {"MiB": MIB, "GiB": 2**30}[unit])


@of_the_cpu
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.whole)])
def test_a_budget_that_nothing_fits_names_what_would_do(name: str) -> None:
    case, budget = case_of(name), int(1.5 * MIB)
    boosted = boost(case.model(), budget, activations="auto")
    weights = copies(boosted.model.parameters())
    with pytest.raises(castor.OutOfMemoryError) as caught:
        step(boosted, case.batch(0), case)
    said = str(caught.value)
    found = re.search(
        r"A step of 4 x 256 tokens, .* takes at least (\S+) (MiB), of which activations and "
        r"temporaries are (\S+) MiB: block '(.*?)' \(module '(.*?)'\) does\. Raise device_memory "
        r"to that or more, or make it smaller: 4 x (\d+) tokens or (\d+) x 256 tokens would do$",
        said,
    )
    assert found, said
    assert "activations='auto'" not in said
    assert "out of memory" in caught.value.args[0]  # for find_executable_batch_size
    assert_equal(copies(boosted.model.parameters()), weights)
    needed, longest, batch = bytes_of(*found.groups()[:2]), int(found[6]), int(found[7])
    assert trains(case, int(1.05 * needed))
    assert not trains(case, int(0.9 * needed))
    assert trains(case_of(name, 4, int(0.95 * longest)), budget)
    assert not trains(case_of(name, 4, int(1.15 * longest)), budget)
    assert trains(case_of(name, batch, 256), budget)


def simulated_model(case: Case) -> dict[int, int]:
    """Bytes that a step needs, by pieces of MLPs, with logits in the smallest pieces."""
    boosted = boost(case.model(), activations="auto")
    simulated = engine_of(boosted.model).blocks._tight._simulated  # type: ignore[attr-defined]
    ladder = simulated._ladder((4, 256))
    return {pieces.tiles: simulated._need((4, 256), pieces).total_bytes for pieces in ladder}


@of_the_cpu
@pytest.mark.parametrize("name", BUILDS)
def test_mlps_run_in_pieces_where_nothing_else_fits(name: str) -> None:
    case = case_of(name)
    needed, plain = simulated_model(case), boost(case.model(), tile_logits=False)
    assert needed[16] < needed[4] < 0.9 * needed[1]
    losses = train_on(plain, case)
    for budget, tiles in (
        (2 * needed[1], 0),
        (int(1.01 * needed[1]), 0),
        (int(1.08 * needed[4]), 4),
    ):
        boosted = boost(case.model(), budget, activations="auto")
        assert train_on(boosted, case) == pytest.approx(losses, rel=2e-6)
        report = boosted.report()
        assert report.peak_device_bytes <= budget
        assert (report.mlp_tiles, report.tiled_blocks) == (tiles, 2 if tiles else 0)
        assert report.logit_tiles == (16 if tiles else 0)
        assert report.divergent_steps == 0
        shown = castor.report.summary(boosted.model)
        assert ("MLPs in 4 pieces, for the budget" in shown) is (tiles > 0)
        if not tiles:
            assert_equal(copies(boosted.model.parameters()), copies(plain.model.parameters()))


@of_the_cpu
def test_what_cannot_run_in_pieces_is_left_whole() -> None:
    build = small(hf.GPT2Config, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0)
    case = replace(case_of("gpt2"), build=build)  # with dropout
    budget = int(1.1 * min(simulated_model(case).values()))
    plain = boost(case.model(), tile_logits=False)
    boosted = boost(case.model(), budget, activations="auto")
    runs = []
    for one in (plain, boosted):
        torch.manual_seed(7)
        runs.append(train_on(one, case))
    assert runs[0] == pytest.approx(runs[1], rel=2e-6)
    assert (boosted.report().mlp_tiles, boosted.report().tiled_blocks) == (0, 0)


class Mean(nn.Module):
    """Around an MLP; looks at the other rows."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x - x.mean(-2, keepdim=True))


class Noisy(Mean):
    """... draws random numbers, in a way that no module tells of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(nn.functional.dropout(x, 0.1))


@pytest.mark.parametrize("around", [Mean, Noisy])
def test_mlps_whose_rows_depend_on_one_another_are_left_whole(around: type[Mean]) -> None:
    def build() -> nn.Module:
        model = BUILDS["llama"]()
        for layer in model.model.layers:
            layer.mlp = around(layer.mlp)
        return model

    case = replace(case_of("llama"), build=build)
    plain = boost(case.model(), tile_logits=False)
    boosted = boost(case.model(), activations="auto", tile_logits=False)
    blocks: Any = engine_of(boosted.model).blocks
    blocks._tight.comes = lambda *_: blocks._auto.tiles.number == 1
    blocks._tight.pieces = Pieces(tiles=4)
    runs = []
    for one in (plain, boosted):
        torch.manual_seed(7)
        runs.append([*train_on(one, case), torch.rand(1).item()])
    assert runs[0] == runs[1]
    assert boosted.report().tiled_blocks == 0
    assert_equal(copies(boosted.model.parameters()), copies(plain.model.parameters()))
