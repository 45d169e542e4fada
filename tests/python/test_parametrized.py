"""Parametrizations of a boosted model's parameters that come and go in forward, as PEFT's do."""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.utils import parametrize, spectral_norm, weight_norm

import castor
from castor.runtime.engine import engine_of
from helpers import assert_equal, boost, copies, tight_memory
from test_adapters import assert_written_as_peft_does
from test_recomputed_blocks import MODELS, of_boosted, of_plain, passes
from zoo import Case

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # It translates names of version 4 for all linear layers.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
]
MIXTRAL = MODELS["mixtral"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "parameters": {"target_modules": [], "target_parameters": EXPERTS},
    "names of version 4": {"target_modules": ["w1", "w2", "w3"]},
}


def adapted(targets: str) -> Any:
    base: Any = MIXTRAL.build()
    config = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **TARGETS[targets])
    return get_peft_model(base, config)


def lora(targets: str = "all-linear") -> Case:
    return replace(MIXTRAL, name="lora", build=lambda: adapted(targets))


@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_of_fused_experts_train_as_in_plain_pytorch(targets: str) -> None:
    case = lora(targets)
    expected = of_plain(case)
    for activations in ("keep", "recompute", "offload", "auto"):
        found, report = of_boosted(case, activations=activations)
        assert_equal(found, expected)
        assert report.divergent_steps == 0


def test_frozen_experts_stay_what_they_are_and_are_not_copied_back() -> None:
    case = lora("parameters")
    boosted = boost(case.model(), activations="recompute", tile_logits=False)
    experts = boosted.model.get_submodule("base_model.model.model.layers.0.mlp.experts")
    (param,) = (p for name, p in experts.named_parameters() if name.endswith("gate_up_proj"))
    version = param._version
    passes(boosted.model, lambda loss: boosted.booster.backward(loss, boosted.optimizer), case)
    assert param._version == version


@pytest.mark.parametrize("activations", ["keep", "recompute", "auto"])
def test_adapters_of_fused_experts_train_in_a_tight_budget(activations: str) -> None:
    case = lora()
    memory = tight_memory(case.model, lambda model, seed: model(**case.batch(seed)).loss)
    expected = of_plain(case)
    boosted = boost(case.model(), memory, activations=activations, tile_logits=False)
    found = passes(
        boosted.model, lambda loss: boosted.booster.backward(loss, boosted.optimizer), case
    )
    assert_equal(found, expected)


def trained(model: Any, **settings: Any) -> Any:
    boosted = boost(model, **settings)
    for seed in range(2):
        boosted.step(boosted.model(**MIXTRAL.batch(seed)).loss)
    return boosted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_of_fused_experts_are_written_as_peft_writes_them_and_read_back(
    precision: str, tmp_path: Path
) -> None:
    first = trained(lora().model(), precision=precision)
    first.booster.save_model(first.model, tmp_path / "mine")
    assert_written_as_peft_does(first.model, tmp_path / "mine", tmp_path / "theirs")
    second = boost(lora().model(), precision=precision)
    assert second.booster.load_model(second.model, tmp_path / "mine") == ([], [])
    assert_equal(copies(second.model.parameters()), copies(first.model.parameters()))
    first.booster.save(tmp_path / "run", first.model, first.optimizer)
    third = boost(lora().model(), precision=precision)
    third.booster.load(tmp_path / "run", third.model, third.optimizer)
    for boosted in (first, third):
        boosted.step(boosted.model(**MIXTRAL.batch(5)).loss)
    assert_equal(copies(third.model.parameters()), copies(first.model.parameters()))


def test_adapters_of_fused_experts_generate_merge_and_change_as_in_plain_pytorch() -> None:
    def several() -> PeftModel:
        model: PeftModel = lora().model()  # type: ignore[assignment]
        config = LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear")
        model.add_adapter("other", config)
        return model

    plain: Any = lora().model()
    boosted: Any = boost(lora().model()).model
    ids = MIXTRAL.batch(0)["input_ids"][:, :5]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for model in (plain, boosted):
            model.eval()
        assert torch.equal(boosted.generate(input_ids=ids, **options),
                           plain.generate(input_ids=ids, **options))  # fmt: skip
        merged = copy.deepcopy(boosted).merge_and_unload()
        assert torch.equal(merged(ids).logits, plain.merge_and_unload()(ids).logits)
    plain, boosted = several().eval(), boost(several()).model.eval()
    for name in ("other", "default"):
        for model in (plain, boosted):
            model.base_model.set_adapter(name, inference_mode=True)
        with torch.no_grad():
            assert torch.equal(boosted(ids).logits, plain(ids).logits)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


class Shifted(nn.Module):
    """Has a parameter of its own."""

    def __init__(self, shift: nn.Parameter) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.shift


@contextmanager
def for_now(module: nn.Module, parametrization: nn.Module) -> Any:
    """Has the weight of a module parametrized within."""
    parametrize.register_parametrization(module, "weight", parametrization)
    try:
        with parametrize.cached():
            yield
    finally:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


class Own(nn.Module):
    """Three layers of which some weights are others during forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.shift = nn.Parameter(torch.randn(16, 16) / 4)
        if how == "norms":
            weight_norm(self.layers[0])
            spectral_norm(self.layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        if self.how == "symmetric":
            with for_now(first, Symmetric()), for_now(second, Symmetric()):
                return third(second(first(x)).relu())
        if self.how == "of the model":
            with for_now(first, Shifted(self.shift)):
                return third(second(first(x)).relu())
        if self.how == "functional":
            weights = {"weight": second.weight + self.shift, "bias": second.bias}
            return third(torch.func.functional_call(second, weights, (first(x),)))
        return third(second(first(x)).relu())


@pytest.mark.parametrize("how", ["symmetric", "of the model", "functional", "norms"])
def test_weights_that_are_others_during_forward(how: str) -> None:
    def steps(model: nn.Module, step: Callable[[torch.Tensor], Any]) -> list[float]:
        losses = []
        for seed in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean()
            step(loss)
            losses.append(loss.item())
        return losses

    def build() -> Own:
        torch.manual_seed(0)
        return Own(how)

    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    expected = steps(plain, step)
    model = build()
    boosted = boost(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    # castor's fused Adam follows torch's within rounding, which differs by processor.
    assert steps(boosted.model, boosted.step) == pytest.approx(expected, rel=1e-6)
    assert type(boosted.model.layers[0]) is nn.Linear  # type: ignore[index]


def test_a_parametrization_with_new_parameters_is_refused_and_leaves_the_module_as_it_was() -> None:
    boosted = boost(Own(""))
    linear: Any = boosted.model.get_submodule("layers.0")
    weight, x = linear.weight, torch.randn(4, 16)
    before = boosted.model(x)
    with pytest.raises(castor.UsageError, match=r"parametrization of 'weight' with parameters to"):
        parametrize.register_parametrization(linear, "weight", Shifted(nn.Parameter(torch.ones(1))))
    assert type(linear) is nn.Linear
    assert linear.weight is weight
    with for_now(linear, Symmetric()), pytest.raises(castor.UsageError, match="parametrization of"):
        parametrize.register_parametrization(linear, "weight", Shifted(nn.Parameter(torch.ones(1))))
    assert linear.weight is weight
    with pytest.raises(castor.UsageError, match="parameter 'weight' is set on a Linear"):
        linear.weight = boosted.model.shift
    assert torch.equal(boosted.model(x), before)
    assert engine_of(boosted.model).report().divergent_steps == 0
