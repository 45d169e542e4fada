"""LazyInitContext: nothing is allocated before boost, and then the weights are the eager ones."""

import copy
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import nullcontext

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

import castor
from castor import Booster, GeminiPlugin, LazyInitContext, UsageError
from castor.lazy.tensor import LazyTensor
from zoo import CASES, gpt2


def boost(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = GeminiPlugin(device="cpu", device_memory="64MiB", **options)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def lazily(case):
    torch.manual_seed(1234)
    with LazyInitContext():
        return case.build()


def assert_same_state(lazy, eager):
    expected = eager.state_dict(keep_vars=True)
    found = lazy.state_dict(keep_vars=True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor.cpu()), name
        assert found[name].dtype == tensor.dtype
        assert found[name].requires_grad == tensor.requires_grad
    buffers = dict(lazy.named_buffers())
    for name, buffer in eager.named_buffers():
        assert torch.equal(buffers[name].cpu(), buffer.cpu()), name
        assert type(buffers[name]) is torch.Tensor


@pytest.mark.parametrize("name", CASES)
def test_boost_gives_the_weights_of_eager_construction(name):
    lazy = lazily(CASES[name])
    assert all(isinstance(param, LazyTensor) for param in lazy.parameters())
    boost(lazy)
    assert all(type(param) is nn.Parameter for param in lazy.parameters())
    assert_same_state(lazy, CASES[name].model())


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_bf16_masters_are_the_eager_weights(name):
    lazy, eager = lazily(CASES[name]), CASES[name].model()
    boost(lazy, precision="bf16")
    boost(eager, precision="bf16")
    assert_same_state(lazy, eager)
    for model_engines in [
        (castor.runtime.engine.engine_of(lazy), castor.runtime.engine.engine_of(eager))
    ]:
        mine, theirs = model_engines
        for i in range(len(mine.params)):
            assert torch.equal(mine.session.master(i), theirs.session.master(i))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_models_made_in_another_dtype(precision):
    def build():
        torch.manual_seed(5)
        config = hf.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
        )  # fmt: skip
        return hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    with LazyInitContext():
        lazy = build()
    eager = build()
    lazy.model.norm.weight.requires_grad_(False)
    eager.model.norm.weight.requires_grad_(False)
    boost_frozen(lazy, precision)
    boost_frozen(eager, precision)
    assert_same_state(lazy, eager)


def boost_frozen(model, precision):
    trainable = [param for param in model.parameters() if param.requires_grad]
    plugin = GeminiPlugin(device="cpu", device_memory="64MiB", precision=precision)
    Booster(plugin=plugin).boost(model, torch.optim.AdamW(trainable))


def test_training_with_dropout_draws_the_same_numbers():
    def losses(context):
        torch.manual_seed(7)
        with context:
            model = gpt2(dropout=0.1)
        booster, model, optimizer = boost(model)
        found = []
        for seed in range(3):
            loss = model(**CASES["gpt2"].batch(seed)).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(LazyInitContext()) == losses(torch.enable_grad())


def test_the_users_random_stream_is_left_alone_if_used_in_between():
    lazy = lazily(CASES["gpt2"])
    torch.manual_seed(99)
    boost(lazy)
    drawn = torch.rand(3)
    torch.manual_seed(99)
    assert torch.equal(drawn, torch.rand(3))
    assert_same_state(lazy, CASES["gpt2"].model())


def test_reseeding_inside_with_the_same_seed_is_seen():
    def build():
        torch.manual_seed(3)
        first = nn.Linear(4, 4)
        torch.manual_seed(3)
        return nn.Sequential(first, nn.Linear(4, 4))

    with LazyInitContext():
        lazy = build()
    boost(lazy)
    assert_same_state(lazy, build())
    assert torch.equal(lazy[0].weight, lazy[1].weight)


class Initialised(nn.Module):
    """Initialises through views, other tensors, data=, functional results and linear algebra."""

    def __init__(self):
        super().__init__()
        self.view = nn.Parameter(torch.empty(6, 4))
        with torch.no_grad():
            self.view[1:3].uniform_(-1, 1)
            self.view[3:].copy_(torch.arange(12).view(3, 4))
            self.view[0] = self.view[1] * 2
        self.made = nn.Parameter(torch.randn(5, 3) * 0.02)
        self.given = nn.Parameter(torch.empty(3))
        self.given.data = torch.linspace(0, 1, 3)
        self.rates = [float(x) for x in torch.linspace(0, 0.3, 4)]
        self.table = torch.ones(2, 2).tolist()
        self.orthogonal = nn.Linear(4, 8)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(self.orthogonal.bias, std=0.5)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)))
        self.plain = torch.full((3,), 2.0)
        self.layers = nn.ModuleList(copy.deepcopy(self.orthogonal) for _ in range(2))

    def forward(self, x):
        return self.orthogonal(x)


def test_initialisers_of_every_kind():
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LazyInitContext():
            lazy = Initialised()
    torch.manual_seed(1)
    eager = Initialised()
    boost(lazy)
    assert_same_state(lazy, eager)
    assert lazy.rates == eager.rates
    assert lazy.table == eager.table
    assert torch.equal(lazy.plain, eager.plain)
    assert type(lazy.plain) is torch.Tensor


def test_an_initialiser_that_reads_random_values_is_named_and_run_eagerly():
    def build():
        torch.manual_seed(2)
        first = nn.Linear(4, 4)
        scale = torch.rand(()).item()
        second = nn.Linear(4, 4)
        nn.init.constant_(second.bias, scale)
        nn.init.normal_(first.bias)
        return nn.Sequential(first, second)

    with pytest.warns(UserWarning, match=r"item\(\) reads a value .* in build"), LazyInitContext():
        lazy = build()
    boost(lazy)
    assert_same_state(lazy, build())


def test_an_initialiser_is_named_wherever_its_file_lies_and_whatever_calls_it(tmp_path):
    """In a folder called castor, or torch, and through decorators of the standard library."""
    source = """
import contextlib

import torch
from torch import nn

@contextlib.contextmanager
def nothing():
    yield

@nothing()
@torch.no_grad()
def draw():
    return torch.rand(()).item()

def build():
    return nn.Linear(2, 2), draw()
"""
    for folder in ("castor", "torch"):
        path = tmp_path / folder / "model.py"
        path.parent.mkdir()
        path.write_text(source)
        module = runpy.run_path(str(path))
        named = rf"in draw \({re.escape(str(path))}:14\)"
        with pytest.warns(UserWarning, match=named), LazyInitContext():
            module["build"]()


def test_results_of_tensors_that_were_computed_early_are_ordinary():
    with LazyInitContext():
        layer = nn.Linear(2, 2)
        with pytest.warns(UserWarning, match="numpy reads a value"):
            layer.weight.detach().numpy()
        doubled = layer.weight.detach() * 2
    assert type(doubled) is torch.Tensor
    LazyInitContext.materialize(layer)
    assert torch.equal(doubled, layer.weight.detach() * 2)


def test_changes_after_the_context_are_recorded_too():
    def change(model):
        with torch.no_grad():
            model.lm_head.weight[3].zero_()
            model.transformer.h[0].mlp.c_fc.bias.normal_()
        return model

    lazy, eager = lazily(CASES["gpt2"]), CASES["gpt2"].model()
    torch.manual_seed(8)
    change(lazy)
    torch.manual_seed(8)
    change(eager)
    boost(lazy)
    assert_same_state(lazy, eager)


def test_two_models_of_one_context_are_boosted_apart():
    def build():
        torch.manual_seed(4)
        return nn.Linear(3, 5), nn.Linear(5, 2)

    with LazyInitContext():
        first, second = build()
    expected = build()
    boost(second)
    assert isinstance(first.weight, LazyTensor)
    boost(first)
    assert_same_state(first, expected[0])
    assert_same_state(second, expected[1])


def test_a_failed_boost_leaves_the_model_lazy():
    lazy = lazily(CASES["gpt2"])
    optimizer = torch.optim.AdamW(lazy.parameters())
    plugin = GeminiPlugin(device="cpu", device_memory="64MiB", host_memory="1KiB")
    with pytest.raises(castor.OutOfMemoryError):
        Booster(plugin=plugin).boost(lazy, optimizer)
    assert all(isinstance(param, LazyTensor) for param in lazy.parameters())
    Booster(plugin=GeminiPlugin(device="cpu")).boost(lazy, optimizer)
    assert_same_state(lazy, CASES["gpt2"].model())


def test_materialize_without_boost():
    lazy = lazily(CASES["bert"])
    params = list(lazy.parameters())
    assert LazyInitContext.materialize(lazy) is lazy
    assert all(a is b for a, b in zip(params, lazy.parameters(), strict=True))
    assert_same_state(lazy, CASES["bert"].model())


def test_boost_inside_the_context_is_refused():
    with LazyInitContext():
        model = nn.Linear(2, 2)
        with pytest.raises(UsageError, match="leave the LazyInitContext first"):
            boost(model)


def test_contexts_do_not_nest():
    with LazyInitContext(), pytest.raises(UsageError, match="one at a time"):
        LazyInitContext().__enter__()


def test_a_constant_changed_before_boost_is_named():
    values = torch.ones(4)
    with LazyInitContext():
        model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(values)
    values.zero_()
    with pytest.raises(UsageError, match=r"shape \(4,\).*changed in place before boost"):
        boost(model)


def test_addresses_and_pickles_are_refused():
    with LazyInitContext():
        model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="data_ptr"):
        model.weight.data_ptr()
    with pytest.raises(UsageError, match="no values to save"):
        copy.copy(model.weight).__reduce_ex__(2)


def test_the_old_name_is_the_same_class():
    assert castor.ZeroInitContext is LazyInitContext


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_from_pretrained_reads_into_the_chunks(name, precision, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    original = CASES[name].model()
    original.save_pretrained(tmp_path)
    model_class = type(original)
    with LazyInitContext():
        lazy = model_class.from_pretrained(tmp_path)
    assert all(isinstance(param, LazyTensor) for param in lazy.parameters())
    eager = model_class.from_pretrained(tmp_path)
    assert lazy.training == eager.training
    boost(lazy, precision=precision)
    boost(eager, precision=precision)
    assert_same_state(lazy, eager)


@pytest.mark.parametrize("imported", ["before", pytest.param("inside", marks=pytest.mark.whole)])
def test_from_pretrained_is_lazy_in_a_process_that_has_seen_no_model_class(imported, tmp_path):
    gpt2().save_pretrained(tmp_path)
    script = """
import sys
from contextlib import nullcontext

import safetensors
import torch
from castor import Booster, GeminiPlugin, LazyInitContext
from castor.lazy.tensor import LazyTensor

path, imported = sys.argv[1:]
own = safetensors.safe_open
if imported == "before":
    import transformers
assert "transformers.modeling_utils" not in sys.modules
with LazyInitContext():
    if imported == "inside":
        import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    bystander = safetensors.safe_open(path + "/model.safetensors", framework="pt")
    assert type(bystander.get_tensor("transformer.ln_f.weight")) is torch.Tensor
assert all(isinstance(param, LazyTensor) for param in model.parameters())
assert safetensors.safe_open is own is transformers.modeling_utils.safe_open
eager = transformers.AutoModelForCausalLM.from_pretrained(path)
Booster(GeminiPlugin(device="cpu", device_memory="64MiB")).boost(model)
for param, other in zip(model.parameters(), eager.parameters(), strict=True):
    assert type(other) is torch.nn.Parameter and torch.equal(param, other)
"""
    arguments = [sys.executable, "-c", script, str(tmp_path), imported]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_from_pretrained_initialises_what_the_checkpoint_lacks(tmp_path):
    gpt2().transformer.save_pretrained(tmp_path)
    torch.manual_seed(6)
    with LazyInitContext():
        lazy = hf.GPT2ForSequenceClassification.from_pretrained(
            tmp_path, num_labels=3, pad_token_id=0
        )
    torch.manual_seed(6)
    eager = hf.GPT2ForSequenceClassification.from_pretrained(tmp_path, num_labels=3, pad_token_id=0)
    boost(lazy)
    assert_same_state(lazy, eager)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_and_load_file_read_into_the_chunks_as_well(tmp_path):
    """Without the warning of LazyInitContext that it computes all at once."""
    case = CASES["llama"]
    peft.get_peft_model(
        case.build(), peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    ).save_pretrained(tmp_path / "adapter")
    save_file(case.build().state_dict(), tmp_path / "base.safetensors")
    made = []
    for lazy in (True, False):
        with LazyInitContext() if lazy else nullcontext():
            model = case.build()
            model.load_state_dict(load_file(tmp_path / "base.safetensors"))
            made.append(peft.PeftModel.from_pretrained(model, tmp_path / "adapter"))
    assert all(isinstance(param, LazyTensor) for param in made[0].parameters())
    booster = Booster(GeminiPlugin(device="cpu", device_memory="64MiB"))
    assert_same_state(booster.boost(made[0])[0], made[1])


def test_a_file_truncated_before_boost_is_an_error(tmp_path):
    gpt2().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"[Ii]ncomplete|header|too large"), LazyInitContext():
        hf.GPT2LMHeadModel.from_pretrained(tmp_path)
