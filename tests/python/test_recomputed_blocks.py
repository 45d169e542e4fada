"""Blocks whose activations backward computes again: plain PyTorch's bits in less memory."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from torch import nn

import castor
import grids
from castor.activations.blocks import find_blocks
from castor.runtime.engine import engine_of
from helpers import GIB, Boosted, assert_equal, boost, copies, plugin, train_on
from zoo import CASES, VOCABULARY, Batch, Case

LLAMA, GPT2 = CASES["llama"], CASES["gpt2"]
FORWARD_STEPS = 3


def small(config: Callable[..., Any], **settings: Any) -> Callable[[], nn.Module]:
    """What builds a small decoder of that architecture."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    return lambda: hf.AutoModelForCausalLM.from_config(config(**(shape | settings)))


def with_dropout(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model, every dropout in it on."""

    def dropping() -> nn.Module:
        model = build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
            for name in ("dropout", "attention_dropout", "dropout_rate"):
                if type(getattr(module, name, None)) is float:
                    setattr(module, name, 0.1)
        return model

    return dropping


MORE = {
    "gemma2": small(hf.Gemma2Config, head_dim=12, num_key_value_heads=2, pad_token_id=0),
    "mistral": small(hf.MistralConfig, num_key_value_heads=2),
    "qwen3": small(hf.Qwen3Config, num_key_value_heads=2, head_dim=12),
    "qwen3-moe": small(
        hf.Qwen3MoeConfig, num_key_value_heads=2, head_dim=12, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "bloom": small(hf.BloomConfig, n_layer=2, n_head=4),
    "falcon": small(hf.FalconConfig, alibi=False),
    "gpt-neox": small(hf.GPTNeoXConfig),
    "phi": small(hf.PhiConfig),
    "glm": small(hf.GlmConfig, num_key_value_heads=2, head_dim=12, pad_token_id=0),
    "olmo2": small(hf.Olmo2Config, num_key_value_heads=2),
}  # fmt: skip
MODELS = CASES | {name: replace(LLAMA, name=name, build=build) for name, build in MORE.items()}
SOME_MODELS = grids.some(
    tuple(MODELS), "llama", "gpt2", "bert", "t5", "vit", "mixtral", "gemma2", "falcon"
)
"""Where other tests go through families."""
HYBRIDS = {
    "qwen3-next": small(
        hf.Qwen3NextConfig, num_key_value_heads=2, head_dim=12, num_experts=4,
        layer_types=["linear_attention", "full_attention"],
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "bamba": small(
        hf.BambaConfig, num_key_value_heads=2, attn_layer_indices=[0], mamba_d_head=12,
        mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8,
    ),
    "recurrent-gemma": small(
        hf.RecurrentGemmaConfig, num_hidden_layers=3, num_key_value_heads=1, head_dim=12,
        lru_width=48, attention_window_size=16,
    ),
}  # fmt: skip
"""Decoders of which some layers have no keys and values, but states."""


def passes(model: nn.Module, backward: Callable[[torch.Tensor], Any], case: Case) -> list[Any]:
    """Loss, gradients and what the generator gives next, of a few passes."""
    torch.manual_seed(5)
    found: list[Any] = []
    for number in range(FORWARD_STEPS):
        batch = case.batch(number)
        loss = case.loss(model(**batch), batch)
        backward(loss)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        found += [loss.detach().cpu(), *copies(grads)]
        found.append(torch.rand(1))
        model.zero_grad()
    return found


def of_plain(case: Case) -> list[Any]:
    return passes(case.model(), lambda loss: loss.backward(), case)


def of_boosted(case: Case, **settings: Any) -> tuple[list[Any], castor.MemoryReport]:
    boosted = boost(case.model(), tile_logits=False, **settings)
    found = passes(
        boosted.model, lambda loss: boosted.booster.backward(loss, boosted.optimizer), case
    )
    return found, boosted.report()


@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_random_state_are_plain_pytorchs(name: str, dropout: bool) -> None:
    case = MODELS[name]
    case = replace(case, build=with_dropout(case.build)) if dropout else case
    expected = of_plain(case)
    kept, before = of_boosted(case)
    assert_equal(kept, expected)
    blocks = list(find_blocks(case.model()))
    assert len(blocks) >= 2
    assert (before.activation_blocks, before.recomputed_blocks) == (len(blocks), 0)
    for activations, count in (
        ("recompute", len(blocks)),
        ({"*": "recompute", blocks[0]: "keep"}, len(blocks) - 1),
        ({blocks[-1]: "recompute"}, 1),
    ):
        found, report = of_boosted(case, activations=activations)
        assert_equal(found, expected)
        assert report.recomputed_blocks == count
        assert report.divergent_steps == 0
        if count == len(blocks):
            assert report.peak_nonmodel_bytes < before.peak_nonmodel_bytes


@pytest.mark.parametrize(
    ("name", "part"),
    [("llama", "mlp"), ("gpt2", "mlp"), ("mixtral", "mlp"), ("bert", "intermediate")],
)
def test_parts_of_blocks(name: str, part: str) -> None:
    case = MODELS[name]
    expected = of_plain(case)
    before = of_boosted(case)[1]
    found, report = of_boosted(case, activations=f"recompute:{part}")
    assert_equal(found, expected)
    assert report.recomputed_blocks == report.activation_blocks
    assert report.peak_nonmodel_bytes < before.peak_nonmodel_bytes


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_training_in_a_tight_budget(name: str, overlap: str) -> None:
    case = MODELS[name]
    settings: dict[str, Any] = {"overlap": overlap, "tile_logits": False}
    if overlap == "backward":
        settings |= {"nonfinite": "ignore", "enable_gradient_accumulation": False}
    kept = boost(case.model(), **settings)
    losses = train_on(kept, case)
    tight = boost(case.model(), activations="recompute", **settings)
    peak = train_on(tight, case) and tight.report().peak_nonmodel_bytes
    budget = peak + sum(param.nbytes for param in kept.model.parameters()) // 2
    assert_same_run_in(budget, kept, losses, case, activations="recompute", **settings)


def assert_same_run_in(
    budget: int, kept: Boosted, losses: list[float], case: Case, **settings: Any
) -> None:
    """A model that trains in less than `kept` took has its losses and weights."""
    tight = boost(case.model(), budget, **settings)
    assert train_on(tight, case) == losses
    assert_equal(copies(tight.model.parameters()), copies(kept.model.parameters()))
    report = tight.report()
    assert report.peak_device_bytes <= budget < kept.report().peak_device_bytes
    assert report.divergent_steps == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_and_accumulation(precision: str, tmp_path: Path) -> None:
    assert_same_in_half_precision(precision, activations="recompute", nvme_path=tmp_path)


def assert_same_in_half_precision(precision: str, **changed: Any) -> None:
    """The settings change nothing in a run that accumulates gradients."""
    runs = []
    for settings in ({}, changed):
        boosted = boost(LLAMA.model(), precision=precision, **settings)
        losses = train_on(boosted, LLAMA, micro_batches=2)
        runs.append((losses, copies(boosted.model.parameters())))
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])


def test_only_training_forwards_are_recomputed() -> None:
    assert_only_training_differs("recompute")


def assert_only_training_differs(activations: str) -> None:
    """Forwards without backward, evaluation and generation are plain PyTorch's."""
    boosted = boost(GPT2.model(), activations=activations, tile_logits=False)
    ids = GPT2.batch(0)["input_ids"]
    with torch.no_grad():
        expected = boosted.model(ids).logits
    assert torch.equal(boosted.model(ids).logits, expected)
    boosted.model.eval()
    plain = GPT2.model().eval()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(boosted.model.generate(ids, **settings), plain.generate(ids, **settings))


class Block(nn.Module):
    """A block of a model that transformers does not know."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.dropout(self.mlp(self.norm(x)))


class Tower(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def assert_refused(model: nn.Module, message: str, activations: Any) -> None:
    """Boosting says so, and the model is as it was."""
    with pytest.raises(castor.UsageError, match=message):
        boost(model, activations=activations)
    assert not model._forward_pre_hooks


def own(block: type[nn.Module] = Block) -> Case:
    def batch(seed: int) -> Batch:
        return {"x": torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))}

    return Case("own", lambda: Tower(block), batch, lambda loss, _: loss)


@pytest.mark.parametrize(
    "activations", ["recompute", "recompute:mlp", {"blocks.[12]": "recompute"}]
)
def test_blocks_of_a_model_of_ones_own(activations: Any) -> None:
    case = own()
    found, report = of_boosted(case, activations=activations)
    assert_equal(found, of_plain(case))
    assert report.recomputed_blocks == (4 if isinstance(activations, str) else 2)
    assert report.peak_nonmodel_bytes < of_boosted(case)[1].peak_nonmodel_bytes


class Counting(Block):
    """Its second forward is another one."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x, scale=scale * self.count)


class Normed(Block):
    """It counts in a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bn = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return super().forward(self.bn(x), scale=scale)


class Passing(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = hf.DynamicCache()
        for block in self.blocks:
            x = block(x, scale=cache)
        return x.sum()


def test_a_second_forward_that_is_another_one_is_an_error() -> None:
    boosted = boost(Tower(Counting), activations="recompute")
    loss = boosted.model(own().batch(0)["x"])
    with pytest.raises(
        castor.UsageError, match=r"module 'blocks\.0' \(Counting\) gives another out"
    ):
        boosted.booster.backward(loss, boosted.optimizer)


class Allocating(Block):
    """Its backward takes 1 MiB where the last layer's, before which it runs again, is done."""

    taken: ClassVar[list[int]] = []
    moment: ClassVar[Callable[[], tuple[int, int]]]
    """The session's."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        hidden = self.mlp[1](self.mlp[0](self.norm(x)))
        if hidden.requires_grad:
            hidden.register_hook(self.take)
        return x + self.mlp[2](hidden)

    def take(self, grad: torch.Tensor) -> torch.Tensor:
        """A hook on a gradient."""
        before = self.moment()[1]
        more = grad.new_empty(1 << 18)
        self.taken.append(self.moment()[1] - before)
        del more
        return grad


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_backward_goes_on_in_the_budget_behind_a_second_forward_that_stops(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Allocating.taken.clear()
    boosted = boost(Tower(Allocating), activations=activations)
    # Not left there: it holds the session, whose memory would count in later tests' budgets.
    session = engine_of(boosted.model).session
    monkeypatch.setattr(Allocating, "moment", session.step_position, raising=False)
    train_on(boosted, own(), steps=2)
    assert Allocating.taken == 8 * [1 << 20]


class Routed(Block):
    """Its router sees other numbers the second time, as a GPU's rounding may have it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.router = nn.Linear(width, 6)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.count = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.count += 1
        weights = self.router(x).softmax(-1)
        noise = torch.rand(weights.shape, generator=torch.Generator().manual_seed(self.count))
        noise = noise.to(weights.device)
        _, chosen = torch.topk(weights.detach() + noise, 2)
        best = (weights.detach() - noise).argmax(-1, keepdim=True)
        gates = torch.zeros_like(weights).scatter(-1, torch.cat([chosen, best], -1), 1.0) * weights
        mixed = torch.stack([expert(x) for expert in self.experts], -1) @ gates.unsqueeze(-1)
        return super().forward(mixed.squeeze(-1), scale=scale)


def test_a_second_forward_takes_the_experts_of_the_first() -> None:
    case = replace(own(Routed), build=lambda: Tower(Routed))
    found, report = of_boosted(case, activations={"blocks.[13]": "recompute"})
    expected = case.model()
    # What is recomputed counts twice, and its next pass would see other noise: one pass.
    torch.manual_seed(5)
    loss = expected(**case.batch(0))
    loss.backward()
    assert_equal(found[:1], [loss.detach()])
    grads = copies(p.grad for p in expected.parameters() if p.grad is not None)
    assert_equal(found[1 : 1 + len(grads)], grads)
    assert report.recomputed_blocks == 2


def test_a_buffer_that_forward_writes_is_an_error() -> None:
    boosted = boost(Tower(Normed), activations="recompute")
    with pytest.raises(castor.UsageError, match=r"'blocks\.0' \(Normed\) writes its buffer 'bn\."):
        boosted.model(own().batch(0)["x"])


def test_an_argument_that_forward_may_change_is_an_error() -> None:
    boosted = boost(Passing(), activations="recompute")
    with pytest.raises(castor.UsageError, match=r"'blocks\.0' \(Block\) is passed a DynamicCache"):
        boosted.model(own().batch(0)["x"])


def with_prefix() -> nn.Module:
    from peft import PrefixTuningConfig, get_peft_model

    settings = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return get_peft_model(LLAMA.model(), settings)


def in_two_halves(model: Any) -> torch.Tensor:
    """A loss over tokens that see those before them through a cache."""
    ids = LLAMA.batch(0)["input_ids"]
    cache = model(input_ids=ids[:, :6]).past_key_values
    return model(input_ids=ids[:, 6:], labels=ids[:, 6:], past_key_values=cache).loss


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("activations", ["keep", "recompute", "auto"])
def test_what_stands_in_a_cache_is_seen_or_an_error(activations: str) -> None:
    prefixed = boost(with_prefix(), activations=activations)
    boosted = boost(LLAMA.model(), activations=activations)
    cache = hf.DynamicCache()
    with torch.no_grad():
        boosted.model(LLAMA.batch(0)["input_ids"], past_key_values=cache)
    if activations == "keep":
        assert torch.equal(in_two_halves(boosted.model), in_two_halves(LLAMA.model()))
        prefixed.model(**LLAMA.batch(0))
        return
    message = r"'\S*model\.layers\.0' \(LlamaDecoderLayer\) is passed a key-value cache of \d+ pos"
    for model, given in ((prefixed.model, {}), (boosted.model, {"past_key_values": cache})):
        with pytest.raises(castor.UsageError, match=message):
            model(**LLAMA.batch(1), **given)
    boosted.model.eval()
    with torch.no_grad():
        boosted.model(LLAMA.batch(1)["input_ids"], past_key_values=cache)


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_linear_attention_are_recomputed_as_without_a_cache(name: str) -> None:
    """A cache, which the models make by default, rounds some sums otherwise in plain PyTorch."""
    case = replace(LLAMA, build=HYBRIDS[name])
    plain: Any = case.model()
    with_cache = of_plain(case)
    plain.config.use_cache = False
    expected = passes(plain, lambda loss: loss.backward(), case)
    for activations, wanted in (
        ("recompute", expected), ("auto", expected), ("keep", with_cache), ("offload", with_cache),
    ):  # fmt: skip
        found, report = of_boosted(case, activations=activations)
        assert_equal(found, wanted)
        assert (report.recomputed_blocks > 0) == (activations in ("recompute", "auto"))


@pytest.mark.parametrize("name", ["qwen3-next", "bamba"])
def test_what_stands_in_a_cache_of_linear_attention_is_an_error(name: str) -> None:
    case = replace(LLAMA, build=HYBRIDS[name])
    boosted = boost(case.model(), activations="recompute")
    ids = case.batch(0)["input_ids"]
    with torch.no_grad():
        cache = boosted.model(ids).past_key_values
    assert len(cache.layers) == 2
    linear, attention = (0, 1) if name == "qwen3-next" else (1, 0)
    for layer, held in ((linear, "a cache with a state of linear attention"),
                        (attention, r"a key-value cache of \d+ positions")):  # fmt: skip
        block: Any = boosted.model.get_submodule(f"model.layers.{layer}")
        with pytest.raises(
            castor.UsageError, match=rf"'model\.layers\.{layer}' .* is passed {held}"
        ):
            block(torch.zeros(1, 1, 48), cache=cache)


def test_a_cache_that_a_model_passes_without_a_name_takes_no_memory() -> None:
    peaks = []
    for use_cache in (False, True):  # GPT-2's own default
        boosted = boost(GPT2.model(), activations="recompute", tile_logits=False)
        boosted.model.config.use_cache = use_cache
        train_on(boosted, GPT2)
        peaks.append(boosted.report().peak_nonmodel_bytes)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("case", [LLAMA, own()], ids=["llama", "own"])
def test_a_parameter_written_before_backward_is_an_error(case: Case) -> None:
    boosted = boost(case.model(), activations="recompute")
    batch = case.batch(0)
    loss = case.loss(boosted.model(**batch), batch)
    name, block = list(find_blocks(boosted.model).items())[-1]
    with torch.no_grad():
        next(block.parameters()).mul_(2)
    with pytest.raises(castor.UsageError, match=rf"'{name}\.\S+' was written between forward and"):
        boosted.booster.backward(loss, boosted.optimizer)


@pytest.mark.parametrize("case", [LLAMA, own()], ids=["llama", "own"])
def test_copies_and_pickles_are_plain_models(case: Case) -> None:
    boosted = boost(case.model(), activations="recompute")
    expected = of_plain(case)
    duplicate = copy.deepcopy(boosted.model)
    data = pickle.dumps(boosted.model)
    buffer = io.BytesIO()
    torch.save(boosted.model, buffer)
    buffer.seek(0)
    assert b"castor.activations" not in data
    for model in (duplicate, pickle.loads(data), torch.load(buffer, weights_only=False)):
        assert_equal(passes(model, lambda loss: loss.backward(), case), expected)
    found = passes(
        boosted.model, lambda loss: boosted.booster.backward(loss, boosted.optimizer), case
    )
    assert_equal(found, expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_disable` is deprecated:FutureWarning")
def test_the_models_own_checkpointing() -> None:
    kept = boost(LLAMA.model(checkpointing=True))
    assert kept.report().recomputed_blocks == 2
    with pytest.warns(UserWarning, match="gives way to activations: 1 of 2 blocks are recomputed"):
        mixed = boost(
            LLAMA.model(checkpointing=True),
            activations={"*": "keep", "model.layers.1": "recompute"},
        )
    assert mixed.report().recomputed_blocks == 1
    assert train_on(kept, LLAMA) == train_on(mixed, LLAMA)
    mixed.model.gradient_checkpointing_disable()
    assert mixed.report().recomputed_blocks == 0
    assert mixed.report().divergent_steps == 0


def test_blocks_of_a_lazy_model() -> None:
    with castor.LazyInitContext():
        torch.manual_seed(1234)
        model = LLAMA.build()
    model.train()
    boosted = boost(model, activations="recompute")
    assert train_on(boosted, LLAMA) == train_on(boost(LLAMA.model()), LLAMA)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"*": "auto"}, ValueError, "activations has 'auto'; choose 'auto', 'keep'"),
        ({"*": "offload:"}, ValueError, "activations has 'offload:'"),
        (
            "checkpoint",
            ValueError,
            "activations has 'checkpoint'; choose 'auto', 'keep', 'recompute'",
        ),
        ("recompute:", ValueError, "activations has 'recompute:'"),
        (True, TypeError, "activations is True"),
        ({}, TypeError, "activations is {}"),
        ({"*": 3}, TypeError, r"activations is {'\*': 3}"),
        (["keep"], TypeError, "activations is"),
    ],
)
def test_values_that_mean_nothing(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plugin(activations=value)


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        (
            {"layers.*": "recompute"},
            "'layers.*', which is no block's name; blocks are 'model.layers.0'",
        ),
        (
            "recompute:ffn",
            "names the part 'ffn' of 'model.layers.0', a LlamaDecoderLayer without such a",
        ),
    ],
)
def test_blocks_and_parts_that_are_not_there(activations: Any, message: str) -> None:
    assert_refused(LLAMA.model(), message, activations)


def test_a_model_without_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert_refused(model, "has no blocks", "recompute")
    assert boost(model).report().activation_blocks == 0


def test_a_forward_that_somebody_put_there_is_left_alone() -> None:
    model = Tower()
    model.blocks[1].forward = lambda x: x  # type: ignore[union-attr]
    message = "activations='recompute' for 'blocks.1', but a forward has been put in place"
    assert_refused(model, message, "recompute")
    boosted = boost(model, activations={"*": "recompute", "blocks.1": "keep"})
    assert boosted.report().recomputed_blocks == 3
    assert boosted.report().device_budget_bytes == GIB
