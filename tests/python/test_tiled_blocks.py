"""Parts of blocks that run on some rows at a time: plain PyTorch's gradients in less memory."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import castor
from castor.activations.blocks import find_blocks
from castor.activations.tiles import TiledForward
from castor.config import BlockChoice
from helpers import (
    ON_THE_CPU_DEVICE,
    assert_equal,
    boost,
    copies,
    plugin,
    train_on,
)
from test_auto_activations import longer
from test_recomputed_blocks import (
    MODELS,
    Block,
    Normed,
    Tower,
    assert_refused,
    of_boosted,
    of_plain,
    own,
    with_dropout,
)
from zoo import CASES, Case, llama

LLAMA, GPT2 = CASES["llama"], CASES["gpt2"]
TOLERANCE = 2e-6
"""Relative to the largest element, in fp32: sums of pieces, and products of fewer rows."""
CHOICES: list[tuple[Any, str]] = [
    ("tile:4", ""),
    ("recompute+tile:3", "recomputed"),  # 24 rows are 8 each ...
    ("offload+tile:5", "offloaded"),  # ... and four times 5 and once 4
]


def assert_close(found: list[Any], expected: list[Any]) -> None:
    """Losses and gradients but for rounding, and the last random number bit for bit."""
    assert_same_but_rounding(found, expected)
    assert torch.equal(found[-1], expected[-1])


def assert_same_but_rounding(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        difference = (one.detach().cpu() - other.detach().cpu()).abs().max()
        assert difference <= TOLERANCE * other.abs().max().cpu()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "t5", "bloom", "falcon", "vit"])
def test_loss_gradients_and_random_state_are_plain_pytorchs(name: str) -> None:
    case = MODELS[name]
    expected = of_plain(case)
    kept, before = of_boosted(case)
    blocks = len(find_blocks(case.model()))
    for activations, others in CHOICES:
        found, report = of_boosted(case, activations=activations)
        assert_close(found, expected)
        assert (report.tiled_blocks, report.activation_blocks) == (blocks, blocks)
        assert report.recomputed_blocks == (blocks if others == "recomputed" else 0)
        assert report.offloaded_blocks == (blocks if others == "offloaded" else 0)
        if ON_THE_CPU_DEVICE:
            assert report.peak_nonmodel_bytes < before.peak_nonmodel_bytes
    assert_equal(kept, expected)


def test_a_part_that_is_named() -> None:
    case = CASES["bert"]
    for part in ("intermediate", "output"):  # the second is passed two tensors
        found, report = of_boosted(case, activations=f"tile:4:{part}")
        assert_close(found, of_plain(case))
        assert (report.tiled_blocks, report.recomputed_blocks) == (2, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("opt", r"'model\.decoder\.layers\.0', a OPTDecoderLayer without an MLP .* 'fc1', 'fc2'"),
        ("bert", "a BertLayer without an MLP that is a module of its own; it has 'attention', 'in"),
        ("mixtral", r"'model\.layers\.0\.mlp' \(MixtralSparseMoeBlock\), which sends tokens to"),
    ],
)
def test_blocks_without_a_part_for_it_are_refused(name: str, message: str) -> None:
    assert_refused(CASES[name].model(), message, "tile:4")


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        ("tile:4:ffn", "a LlamaDecoderLayer without such a part 'ffn'; it has 'self_attn', 'mlp'"),
        ("recompute:mlp+tile:2", r"asks for two things of 'model\.layers\.0\.mlp'"),
        ({"layers.*": "tile:2"}, "'layers.*', which is no block's name"),
    ],
)
def test_choices_that_do_not_go_together(activations: Any, message: str) -> None:
    assert_refused(LLAMA.model(), message, activations)


def test_some_blocks_by_pattern() -> None:
    activations = {"*": "recompute", "*.1": "offload:self_attn+tile:2"}
    found, report = of_boosted(LLAMA, activations=activations)
    assert_close(found, of_plain(LLAMA))
    assert (report.tiled_blocks, report.recomputed_blocks, report.offloaded_blocks) == (1, 1, 1)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_training_in_a_tight_budget(name: str, overlap: str) -> None:
    case = MODELS[name]
    settings: dict[str, Any] = {"overlap": overlap, "tile_logits": False}
    if overlap == "backward":
        settings |= {"nonfinite": "ignore", "enable_gradient_accumulation": False}
    settings["activations"] = "recompute+tile:2"
    ample = boost(case.model(), **settings)
    losses = train_on(ample, case)
    assert losses == pytest.approx(train_on(boost(case.model()), case), rel=1e-5)
    budget = ample.report().peak_nonmodel_bytes
    budget += sum(param.nbytes for param in ample.model.parameters()) // 2
    tight = boost(case.model(), budget, **settings)
    assert train_on(tight, case) == losses
    assert_equal(copies(tight.model.parameters()), copies(ample.model.parameters()))
    report = tight.report()
    assert report.peak_device_bytes <= budget < ample.report().peak_device_bytes
    assert (report.divergent_steps, ample.report().divergent_steps) == (0, 0)


ROWS, WIDTH, INNER = 4096, 64, 1024


class Wide(nn.Module):
    """A block whose MLP takes nearly all of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = LlamaMLP(hf.LlamaConfig(hidden_size=WIDTH, intermediate_size=INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


class WideTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.skipif(not ON_THE_CPU_DEVICE, reason="sums of the CPU's allocations")
def test_the_peak_falls_by_what_the_other_pieces_would_take() -> None:
    """At the peak, in backward, there are six tensors of (rows, INNER): gate and up, activated and
    multiplied, and two gradients. Of tiles there is more: the whole gradient of the output, and the
    sums of up to three weights' gradients, which are on the host without tiles."""

    def peak(activations: str) -> int:
        torch.manual_seed(0)
        boosted = boost(WideTower(), activations=activations)
        for _ in range(2):
            boosted.step(boosted.model(torch.randn(1, ROWS, WIDTH)))
        assert boosted.report().divergent_steps == 0
        return boosted.report().peak_nonmodel_bytes

    whole = peak("recompute:mlp")
    assert whole < peak("keep") * 2 / 3  # of one of two blocks
    for tiles in (2, 4):
        saved = whole - peak(f"tile:{tiles}")
        of_others = 4 * 6 * INNER * (ROWS - ROWS // tiles) - 4 * ROWS * WIDTH
        weights = 4 * 3 * WIDTH * INNER
        assert of_others - weights - 2 * tiles * torch.get_rng_state().nbytes <= saved <= of_others


def test_recomputed_blocks_keep_no_more_for_their_tiles() -> None:
    def kept_by_four_blocks(activations: str) -> int:
        peaks = []
        for layers in (4, 8):
            case = replace(LLAMA, build=lambda layers=layers: llama(layers=layers))
            boosted = boost(case.model(), activations=activations)
            batch = longer(8, 64, 0)
            boosted.step(boosted.model(**batch).loss)
            peaks.append(boosted.report().peak_nonmodel_bytes)
        return peaks[1] - peaks[0]

    whole = kept_by_four_blocks("recompute")
    states = 4 * 4 * torch.get_rng_state().nbytes  # of each piece
    assert kept_by_four_blocks("recompute+tile:4") <= whole + states


def test_a_parameter_sees_one_gradient_a_pass() -> None:
    seen: list[torch.Tensor] = []
    model = LLAMA.model()
    weight = model.get_submodule("model.layers.1.mlp.up_proj").weight
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    boosted = boost(model, activations="tile:4")
    batch = LLAMA.batch(0)
    boosted.booster.backward(boosted.model(**batch).loss, boosted.optimizer)
    plain = LLAMA.model()
    plain(**batch).loss.backward()
    assert len(seen) == 1
    expected = plain.get_submodule("model.layers.1.mlp.up_proj").weight.grad
    assert_same_but_rounding(seen, [expected])


def test_half_precision_rounds_as_the_gradients_of_so_many_micro_batches() -> None:
    """Autograd adds in the parameters' type: 1.2 times plain PyTorch's own error at 4 tiles."""
    torch.manual_seed(0)
    mlp = LlamaMLP(hf.LlamaConfig(hidden_size=64, intermediate_size=256)).bfloat16().train()
    x, of_output = torch.randn(2, 1, 1024, 64).bfloat16()

    def errors(tiles: int = 0, micro_batches: int = 1) -> list[float]:
        duplicate = copy.deepcopy(mlp)
        if tiles:
            duplicate.forward = TiledForward(duplicate, "mlp", tiles=tiles, compared=True)
        batches = (x.chunk(micro_batches, 1), of_output.chunk(micro_batches, 1))
        for rows, grad in zip(*batches, strict=True):
            (duplicate(rows) * grad).sum().backward()
        exact = copy.deepcopy(mlp).double()
        (exact(x.double()) * of_output.double()).sum().backward()
        pairs = zip(duplicate.parameters(), exact.parameters(), strict=True)
        return [float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs]

    plain, tiled, batches = errors(), errors(tiles=4), errors(micro_batches=4)
    assert tiled == pytest.approx(batches, rel=0.05)
    assert all(ours <= 1.3 * theirs for ours, theirs in zip(tiled, plain, strict=True))


class Mean(nn.Sequential):
    """An MLP that looks at the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-2, keepdim=True))


class Neighbour(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.roll(1, -2))


class Counted(nn.Sequential):
    """... at how many there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / x.shape[-2]


class Numbered(nn.Sequential):
    """... at where each stands."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(x.shape[-2], device=x.device)
        return super().forward(x * numbers.unsqueeze(-1))


class _MixesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad - grad.mean(-2, keepdim=True)


class Mixing(nn.Sequential):
    """... in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = _MixesInBackward.apply(x)
        return super().forward(mixed)


def with_mlp(mlp: type[nn.Sequential]) -> type[nn.Module]:
    class Other(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.mlp = mlp(*self.mlp)

    return Other


@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("mlp", [Mean, Neighbour, Counted, Numbered, Mixing])
def test_rows_that_depend_on_one_another_are_an_error(mlp: type[nn.Sequential], rows: int) -> None:
    boosted = boost(own(with_mlp(mlp)).model(), activations="tile:4")
    message = rf"'blocks\.0\.mlp' \({mlp.__name__}\) gives rows that depend on other rows, so it"
    with pytest.raises(castor.UsageError, match=message):
        boosted.model(torch.randn(rows, 32))


def test_batch_normalisation_is_an_error() -> None:
    boosted = boost(Tower(Normed), activations="tile:2:bn")
    with pytest.raises(castor.UsageError, match=r"'blocks\.0\.bn' \(BatchNorm1d\) writes its buff"):
        boosted.model(**own().batch(0))


def test_dropout_is_an_error() -> None:
    case = replace(GPT2, build=with_dropout(GPT2.build))
    boosted = boost(case.model(), activations="tile:4")
    weights = copies(boosted.model.parameters())
    message = r"'transformer\.h\.0\.mlp' \(GPT2MLP\) draws random numbers \(dropout\), others than"
    with pytest.raises(castor.UsageError, match=message):
        boosted.model(**case.batch(0))
    assert_equal(copies(boosted.model.parameters()), weights)
    boosted.model.eval()
    boosted.model(**case.batch(0))


class Pairs(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return super().forward(x), x


class Given(Block):
    """It passes what has no rows."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.mlp((x, x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Given, "is passed something else than tensors with one row a token"),
        (with_mlp(Pairs), "gives something else than a tensor with one row a token"),
    ],
)
def test_what_cannot_be_cut_into_rows_is_an_error(block: type[nn.Module], message: str) -> None:
    boosted = boost(Tower(block), activations="tile:2")
    with pytest.raises(castor.UsageError, match=message):
        boosted.model(**own().batch(0))


def test_fewer_rows_than_tiles() -> None:
    def few(number: int) -> dict[str, Any]:
        return {"x": own().batch(number)["x"][:3]}

    case = replace(own(), batch=few)
    assert_close(of_boosted(case, activations="tile:8")[0], of_plain(case))


def test_a_gradient_of_a_gradient() -> None:
    def penalty(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = own().batch(0)["x"].requires_grad_()
        (of_x,) = torch.autograd.grad(model(x=x), x, create_graph=True)
        (again,) = torch.autograd.grad(of_x.square().sum(), x)
        return [of_x.detach(), again, torch.rand(1)]

    assert_close(penalty(boost(own().model(), activations="tile:4").model), penalty(own().model()))


def test_only_training_forwards_run_in_tiles() -> None:
    boosted = boost(GPT2.model(), activations="tile:4", tile_logits=False)
    plain = GPT2.model()
    ids = GPT2.batch(0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(boosted.model(ids).logits.cpu(), plain(ids).logits)
    boosted.model.eval()
    plain.eval()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    found = boosted.model.generate(ids, **settings)
    assert torch.equal(found.cpu(), plain.generate(ids, **settings))


@pytest.mark.parametrize("case", [LLAMA, own()], ids=["llama", "own"])
def test_copies_and_pickles_are_plain_models(case: Case) -> None:
    boosted = boost(case.model(), activations="tile:4")
    data = pickle.dumps(boosted.model)
    assert b"castor.activations" not in data
    expected = of_plain(case)

    def of(model: nn.Module) -> list[Any]:
        return of_plain(replace(case, build=lambda: model))

    for duplicate in (copy.deepcopy(boosted.model), pickle.loads(data)):
        assert_equal(of(duplicate), expected)


@pytest.mark.parametrize(
    ("text", "kind", "part", "tiles", "tiled_submodule"),
    [
        ("keep", "keep", "", 0, ""),
        ("recompute:mlp", "recompute", "mlp", 0, ""),
        ("tile:4", "keep", "", 4, ""),
        ("tile:16:block.ff", "keep", "", 16, "block.ff"),
        ("offload+tile:2", "offload", "", 2, ""),
        ("recompute:attn+tile:3:mlp", "recompute", "attn", 3, "mlp"),
    ],
)
def test_what_a_choice_says(
    text: str, kind: str, part: str, tiles: int, tiled_submodule: str
) -> None:
    found = BlockChoice.parse(text)
    assert found == BlockChoice(kind=kind, part=part, tiles=tiles, tiled_submodule=tiled_submodule)


@pytest.mark.parametrize(
    "value",
    ["tile", "tile:", "tile:1", "tile:x", "tile:2:", "tile:-2", "recompute+", "+tile:2",
     "tile:2+recompute", "recompute+offload", "keep:mlp+tile:2", "recompute+tile:1"],
)  # fmt: skip
def test_choices_that_mean_nothing(value: str) -> None:
    for activations in (value, {"*": value}):
        with pytest.raises(ValueError, match=r"activations has '.*'; choose 'auto', 'keep', 'rec"):
            plugin(activations=activations)


def test_the_report_names_tiles() -> None:
    boosted = boost(LLAMA.model(), activations="tile:4")
    train_on(boosted, LLAMA)
    assert "2 of 2 blocks" in castor.report.summary(boosted.model)
    assert "Tiled" in castor.report.summary(boosted.model)
