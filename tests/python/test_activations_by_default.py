"""Without `activations`: "auto" where a device budget is given, and nothing else changes."""

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput

import castor
from castor.activations.fused_heads import fit_fused_heads

pytestmark = [
    # transformers 5.24 names its own older methods.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
    # torch.compile asks tensors within a graph for their gradients.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
KIB, MIB = 2**10, 2**20
AMPLE = 64 * MIB


def llama(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2, **settings,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).train()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=256, n_embd=32, n_layer=4, n_head=2, n_positions=128, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config).train()  # with its dropouts


class Block(GradientCheckpointingLayer):
    """A block that writes a buffer in forward, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        found: torch.Tensor = self.dropout(torch.relu(self.linear(self.norm(hidden)))) + hidden
        return found


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = block(hidden)
        loss: torch.Tensor = hidden.square().mean()
        return loss


def tower() -> nn.Module:
    torch.manual_seed(0)
    return Tower().train()


def inputs_of(model: nn.Module, seed: int, length: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Tower):
        return {"rows": torch.randn(32, 16, generator=generator)}
    ids = torch.randint(256, (2, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def boost(model: nn.Module, budget: int | None, **settings: Any) -> tuple[castor.Booster, Any]:
    settings = {"device": "cpu", "precision": "fp32", "host_memory": 256 * MIB} | settings
    booster = castor.Booster(castor.GeminiPlugin(device_memory=budget, **settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    booster.boost(model, optimizer)
    return booster, optimizer


def steps(
    model: nn.Module,
    budget: int,
    call: Callable[[nn.Module, int], Any] = lambda m, seed: m(**inputs_of(m, seed)),
    **settings: Any,
) -> tuple[list[torch.Tensor], castor.MemoryReport]:
    """Four steps: their losses, then weights and buffers."""
    booster, optimizer = boost(model, budget, **settings)
    torch.manual_seed(1)
    found = []
    for seed in range(4):
        output = call(model, seed)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    kept = (*model.named_parameters(), *model.named_buffers())
    return [*found, *(tensor.detach().clone() for _, tensor in kept)], booster.report()


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_what_is_chosen() -> None:
    def chosen(**settings: Any) -> tuple[Any, bool]:
        config = castor.GeminiPlugin(device="cpu", **settings).config
        return config.activations, config.activations_by_default

    assert chosen() == ("keep", True)
    assert chosen(device_memory=MIB) == ("auto", True)
    assert chosen(device_memory=MIB, activations=None) == ("auto", True)
    for own in ("keep", "auto", "recompute"):
        assert chosen(device_memory=MIB, activations=own) == (own, False)
    assert castor.LowLevelZeroPlugin(device="cpu", device_memory=MIB).config.activations == "auto"
    stages = {"device": "cpu", "device_memory": MIB, "pp_size": 2, "num_microbatches": 2}
    assert castor.HybridParallelPlugin(**stages).config.activations == "auto"
    assert castor.HybridParallelPlugin(**stages, pp_style="zbv").config.activations == "keep"
    assert castor.Config(device_memory=MIB, device="cpu").plugin().config.activations == "auto"


@pytest.mark.parametrize(("build", "budget"), [(llama, 800 * KIB), (gpt2, 1400 * KIB)])
def test_a_budget_too_small_for_keep_trains(build: Callable[[], nn.Module], budget: int) -> None:
    expected, _ = steps(build(), AMPLE, activations="keep")
    with pytest.raises(castor.OutOfMemoryError):
        steps(build(), budget, activations="keep")
    found, report = steps(build(), budget)
    assert_same(found, expected)
    assert report.recomputed_blocks + report.offloaded_blocks > 0


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("budget", [5 * MIB, AMPLE])
def test_what_fits_is_kept(build: Callable[[], nn.Module], budget: int) -> None:
    expected, _ = steps(build(), AMPLE, activations="keep")
    found, report = steps(build(), budget)
    assert_same(found, expected)
    assert report.recomputed_blocks == report.offloaded_blocks == 0


def test_with_an_ample_budget_a_forward_is_the_users_own() -> None:
    model = llama()
    _, optimizer = boost(model, AMPLE)
    output = model(**inputs_of(model, 0))
    assert output.cache.get_seq_length() == 64
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    for copied in (model, copy.deepcopy(model)):
        layers = copied.model.layers  # type: ignore[union-attr]
        assert not any(name in layer.__dict__ for layer in layers for name in names)
    assert not model.is_gradient_checkpointing
    del output, optimizer


def test_more_tokens_than_there_is_room_for_end_the_ease() -> None:
    def call(model: nn.Module, seed: int) -> Any:
        return model(**inputs_of(model, seed, 1024 if seed > 1 else 8))

    expected, _ = steps(llama(), AMPLE, call, activations="keep")
    with pytest.raises(castor.OutOfMemoryError):
        steps(llama(), 18 * MIB, call, activations="keep")
    found, _ = steps(llama(), 18 * MIB, call)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


def test_a_block_that_writes_buffers_is_kept() -> None:
    expected, _ = steps(tower(), AMPLE, activations="keep")
    found, report = steps(tower(), MIB)
    assert_same(found, expected)
    assert report.recomputed_blocks == 0
    found, report = steps(tower(), MIB, activations="auto")  # asked for: kept as well
    assert_same(found, expected)
    assert report.recomputed_blocks == 0
    with pytest.raises(castor.UsageError, match="writes its buffer"):
        steps(tower(), MIB, activations="recompute")


def loops() -> nn.Module:
    """Blocks that run several times a forward, of which each has a layer of the cache."""
    torch.manual_seed(0)
    config = hf.HrmTextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, head_dim=16, max_position_embeddings=128, L_bp_cycles=[2, 3],
    )  # fmt: skip
    return hf.HrmTextForCausalLM(config).train()


@pytest.mark.parametrize("activations", ["auto", "recompute", None])
def test_a_block_that_runs_several_times_has_an_empty_cache(activations: str | None) -> None:
    expected, kept = steps(loops(), AMPLE, activations="keep", tile_logits=False)
    settings = {} if activations is None else {"activations": activations}
    budget = 1 + kept.peak_device_bytes // 2
    found, report = steps(loops(), budget, tile_logits=False, **settings)
    assert_same(found, expected)
    assert report.recomputed_blocks + report.offloaded_blocks > 0


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_cache_that_holds_something_is_read(build: Callable[[], nn.Module]) -> None:
    def call(model: nn.Module, seed: int) -> Any:
        given = inputs_of(model, seed, 32)
        with torch.no_grad():
            cache = model(given["input_ids"][:, :8], use_cache=True).past_key_values
        return model(**given, past_key_values=cache)

    expected, _ = steps(build(), AMPLE, call, activations="keep")
    found, _ = steps(build(), 5 * MIB, call)
    assert_same(found, expected)


def test_a_hook_within_a_block_is_called_once() -> None:
    seen: list[str] = []

    def watched() -> nn.Module:
        model = llama()
        model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append("mlp"))  # type: ignore[union-attr,index]
        return model

    expected, _ = steps(watched(), AMPLE, activations="keep")
    once, seen[:] = list(seen), []
    found, report = steps(watched(), 1200 * KIB)
    assert_same(found, expected)
    assert seen == once
    assert report.recomputed_blocks + report.offloaded_blocks > 0


def test_the_users_own_checkpointing_stays_on_without_a_warning() -> None:
    def checkpointing() -> Any:
        model: Any = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    model = checkpointing()
    own = model.model.layers[0]._gradient_checkpointing_func
    expected, _ = steps(checkpointing(), AMPLE, activations="keep")
    found, report = steps(model, 800 * KIB)
    assert_same(found, expected)
    assert model.model.layers[0]._gradient_checkpointing_func is own
    assert report.recomputed_blocks == 4


def test_checkpointing_may_be_turned_on_and_off_after_boost() -> None:
    model: Any = llama()
    booster, optimizer = boost(model, AMPLE)
    for turn in (model.gradient_checkpointing_enable, model.gradient_checkpointing_disable):
        turn()
        booster.backward(model(**inputs_of(model, 0)).loss, optimizer)
        optimizer.step()
        on = turn == model.gradient_checkpointing_enable
        assert booster.report().recomputed_blocks == (4 if on else 0)
        assert model.is_gradient_checkpointing == on


def test_compiled_blocks_are_kept() -> None:
    model: Any = llama()
    model.model.layers[0].compile(backend="eager")
    booster, optimizer = boost(model, 2 * MIB)
    loss = model(**inputs_of(model, 0)).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    assert booster.report().activation_blocks == 4


def test_simulated_steps_never_call_a_forward_that_holds_the_model() -> None:
    model: Any = llama()
    own, devices = model.forward, set()

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        devices.add(kwargs["input_ids"].device.type)
        return own(*args, **kwargs)

    model.forward = types.MethodType(forward, model)
    _, report = steps(model, 800 * KIB)
    assert devices == {"cpu"}
    assert report.divergent_steps == 0


HEADS = """
import torch

TOKEN_CHUNK_SIZE = 4096


class ChunkedLogProbFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size):
        found = torch.empty(len(hidden))
        buffer = torch.empty(min(len(hidden), TOKEN_CHUNK_SIZE), chunk_size)
        widths.append(chunk_size)
        for begin in range(0, len(hidden), TOKEN_CHUNK_SIZE):
            rows = slice(begin, begin + TOKEN_CHUNK_SIZE)
            logits = buffer[: len(hidden[rows]), : len(weight)]
            torch.mm(hidden[rows], weight.t(), out=logits)
            found[rows] = logits.log_softmax(-1).gather(-1, targets[rows, None]).squeeze(-1)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk_size = chunk_size
        return found

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        torch.empty(min(len(hidden), TOKEN_CHUNK_SIZE), ctx.chunk_size)
        for begin in range(0, len(hidden), TOKEN_CHUNK_SIZE):
            rows = slice(begin, begin + TOKEN_CHUNK_SIZE)
            of_logits = -(hidden[rows] @ weight.t()).softmax(-1)
            of_logits[torch.arange(len(of_logits)), targets[rows]] += 1
            of_logits *= grad[rows, None]
            of_hidden[rows] = of_logits @ weight
            of_weight += of_logits.t() @ hidden[rows]
        return of_hidden, of_weight, None, None, None, None


widths = []
"""
"""TRL's fused head in little: buffers of fixed numbers of rows and columns."""


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("trl.kernels.chunked_logprob")
    exec(HEADS, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def with_fused_head(heads: types.ModuleType) -> nn.Module:
    model: Any = llama()
    own = model.forward

    def forward(_: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = model.model(input_ids).last_hidden_state[:, :-1].reshape(-1, 32)
        logps = heads.ChunkedLogProbFunction.apply(
            hidden, model.lm_head.weight, None, labels[:, 1:].reshape(-1), 1.0, 32768
        )
        return ModelOutput(loss=-logps.mean(), logps=logps)

    model.forward = types.MethodType(forward, model)
    del own
    return model


def test_a_fused_head_of_another_library_runs_in_rows_that_fit(heads: types.ModuleType) -> None:
    expected, _ = steps(with_fused_head(heads), AMPLE, activations="keep", tile_logits=False)
    assert set(heads.widths) == {32768}  # 16 MiB for 126 rows of 256 columns
    found, _ = steps(with_fused_head(heads), AMPLE)
    assert_same(found, expected)
    found, _ = steps(with_fused_head(heads), 700 * KIB)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
    assert heads.TOKEN_CHUNK_SIZE == 4096
    assert heads.widths[-1] == 256
    fit_fused_heads()
    assert not hasattr(heads.ChunkedLogProbFunction.forward.__wrapped__, "__wrapped__")


def test_a_fused_head_for_which_nothing_fits_is_an_error(heads: types.ModuleType) -> None:
    with pytest.raises(castor.OutOfMemoryError):
        steps(with_fused_head(heads), 100 * KIB)
    assert heads.TOKEN_CHUNK_SIZE == 4096
