"""Steps, arguments and refusals of torch's own classes under castor's loop, in one process."""

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import castor
from castor.checkpoint.dataloader import RankSampler
from helpers import losses_of_plain
from zoo import CASES, tower, tower_batch, tower_loss

MAX_NORM = 0.05


def boost(
    model: nn.Module, *optimizers: torch.optim.Optimizer, **settings: Any
) -> tuple[castor.Booster, nn.Module]:
    booster = castor.Booster(castor.TorchDDPPlugin(device="cpu", **settings))
    booster.boost(model, list(optimizers) or None)
    return booster, model


def plain(model: nn.Module, **settings: Any) -> tuple[castor.Booster, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return boost(model, optimizer, **settings)[0], optimizer


@pytest.mark.parametrize("max_norm", [0.0, MAX_NORM])
@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
def test_a_step_is_plain_pytorchs_to_the_bit(max_norm: float, nonfinite: str) -> None:
    reference, model = tower(), tower()
    expected = losses_of_plain(reference, tower_loss, steps=4, max_norm=max_norm)
    booster, optimizer = plain(model, max_norm=max_norm, nonfinite=nonfinite)
    losses = []
    for seed in range(4):
        loss = tower_loss(model, seed)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == expected
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    measured = booster.report().gradient_norm is not None
    assert measured == (max_norm > 0 or nonfinite == "skip")


def test_a_closure_is_run_before_gradients_are_clipped() -> None:
    reference, model = tower(), tower()
    losses_of_plain(reference, tower_loss, steps=1, max_norm=MAX_NORM)
    _, optimizer = plain(model, max_norm=MAX_NORM)

    def closure() -> torch.Tensor:
        loss = tower_loss(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == tower_loss(tower(), 0).item()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


def test_optimizers_of_a_model_take_gradients_that_were_clipped_once() -> None:
    model, reference = tower(), tower()
    layers, head = (
        torch.optim.SGD(model.layers.parameters(), lr=1.0),
        torch.optim.AdamW(model.head.parameters(), lr=1e-3),
    )
    booster, _ = boost(model, layers, head, max_norm=MAX_NORM)
    own = (
        torch.optim.SGD(reference.layers.parameters(), lr=1.0),
        torch.optim.AdamW(reference.head.parameters(), lr=1e-3),
    )
    for seed in range(3):
        tower_loss(model, seed).backward()
        tower_loss(reference, seed).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        for mine, theirs in zip((layers, head), own, strict=True):
            mine.step()
            mine.zero_grad()
            theirs.step()
            theirs.zero_grad()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert booster.report().steps == 3


def test_a_pass_between_two_optimizers_is_clipped_again() -> None:
    model = tower()
    layers, head = (
        torch.optim.SGD(model.layers.parameters(), lr=1.0),
        torch.optim.SGD(model.head.parameters(), lr=1.0),
    )
    booster, _ = boost(model, layers, head, max_norm=MAX_NORM)
    tower_loss(model, 0).backward()
    layers.step()
    model.zero_grad()
    before = [param.detach().clone() for param in model.head.parameters()]
    (100 * tower_loss(model, 1)).backward()
    head.step()
    moved = [param - old for param, old in zip(model.head.parameters(), before, strict=True)]
    assert torch.cat([one.detach().flatten() for one in moved]).norm() <= MAX_NORM
    assert booster.report().steps == 2


def test_gradients_that_are_not_finite_are_skipped_with_a_warning_and_counted() -> None:
    model = tower()
    booster, optimizer = plain(model)
    before = [param.detach().clone() for param in model.parameters()]
    (float("nan") * tower_loss(model, 0)).backward()
    with pytest.warns(RuntimeWarning, match=r"gradient of parameter 'layers\.0\.weight'") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    assert all(param.grad is not None for param in model.parameters())
    with warnings.catch_warnings(record=True) as again:
        optimizer.step()
    assert not again
    assert all(map(torch.equal, model.parameters(), before))
    assert not optimizer.state
    report = booster.report()
    assert (report.steps, report.skipped_steps, report.step_skipped) == (2, 2, True)


def test_gradients_that_are_not_finite_raise_where_that_is_asked_for() -> None:
    model = tower()
    _, optimizer = plain(model, nonfinite="raise")
    (float("nan") * tower_loss(model, 0)).backward()
    with pytest.raises(castor.NonFiniteGradientError, match=r"'layers\.0\.weight'"):
        optimizer.step()
    assert not optimizer.state


def test_a_scheduler_made_before_boost_goes_on() -> None:
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    booster, _ = boost(model, optimizer)
    for seed in range(2):
        booster.backward(tower_loss(model, seed), optimizer)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_bf16_computes_under_autocast_and_keeps_float32() -> None:
    model, reference = tower().bfloat16(), tower().bfloat16().float()
    booster, optimizer = plain(model, precision="bf16")
    outputs = []
    model.head.register_forward_hook(lambda *arguments: outputs.append(arguments[2]))
    loss = tower_loss(model, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = tower_loss(reference, 0)
    assert outputs[0].dtype == torch.bfloat16
    assert loss.item() == expected.item()
    booster.backward(loss, optimizer)
    optimizer.step()
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_hybrid_adam_and_lazy_models_train_as_well() -> None:
    reference = tower()
    expected = losses_of_plain(reference, tower_loss, steps=3)
    with castor.LazyInitContext():
        model = tower()
    optimizer = castor.HybridAdam(model.parameters(), lr=1e-3, weight_decay=1e-2)
    booster, _ = boost(model, optimizer)
    losses = []
    for seed in range(3):
        loss = tower_loss(model, seed)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-6)


# peft asks transformers for what transformers 6 will rename.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_trained_saved_and_read(tmp_path: Path) -> None:
    booster = castor.Booster(castor.TorchDDPPlugin(device="cpu"))
    config = peft.LoraConfig(
        target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    model = booster.enable_lora(CASES["gpt2"].model(), lora_config=config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    booster.boost(model, optimizer)
    booster.backward(model(**CASES["gpt2"].batch(0)).loss, optimizer)
    optimizer.step()
    booster.save_model(model, tmp_path / "adapter")
    read = peft.PeftModel.from_pretrained(CASES["gpt2"].model(), tmp_path / "adapter")
    batch = CASES["gpt2"].batch(1)
    assert read.eval()(**batch).loss.item() == model.eval()(**batch).loss.item()


def test_data_are_those_of_the_other_plugins() -> None:
    loader = castor.TorchDDPPlugin(device="cpu").prepare_dataloader(range(10), 3, shuffle=True)
    assert isinstance(loader.sampler, RankSampler)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(10))


def test_what_is_of_chunks_is_refused_by_name() -> None:
    model = tower()
    booster, optimizer = plain(model)
    for call in (
        lambda: booster.memory(),
        lambda: booster.save_trace("trace.json", model),
        lambda: castor.report.summary(booster),
    ):
        with pytest.raises(castor.UsageError, match="trained by torch's own classes"):
            call()
    with pytest.raises(castor.UsageError, match="nothing says how batches"):
        booster.execute_pipeline(iter([]), model, optimizer=optimizer)
    with pytest.raises(castor.UsageError, match="is boosted"):
        booster.enable_lora(model, lora_config=peft.LoraConfig(target_modules=["head"]))
    with pytest.raises(AttributeError, match="peak_device_bytes is a figure of castor's chunks"):
        _ = booster.report().peak_device_bytes
    with pytest.raises(AttributeError, match="no figure 'bytes'"):
        _ = booster.report().bytes
    with pytest.raises(castor.UsageError, match="parameter 'scale' is set on a Tower"):
        model.scale = nn.Parameter(torch.ones(1))


def test_the_report_says_what_trains_and_what_it_holds() -> None:
    model = tower()
    booster, optimizer = plain(model, max_norm=1.0)
    booster.backward(tower_loss(model, 0), optimizer)
    optimizer.step()
    report = booster.report()
    size = sum(param.nbytes for param in model.parameters())
    assert (report.parameter_bytes, report.gradient_bytes) == (size, size)
    assert report.optimizer_bytes == 2 * size + 4 * len(list(model.parameters()))
    assert "trained by     plain PyTorch" in str(report)


@pytest.mark.parametrize("second", [castor.TorchDDPPlugin, castor.TorchFSDPPlugin])
def test_a_model_is_boosted_once(second: Any) -> None:
    model = tower()
    plain(model)
    with pytest.raises(castor.UsageError, match="boosted already"):
        castor.Booster(second(device="cpu")).boost(model)
    gemini = castor.GeminiPlugin(device="cpu", device_memory="8MiB", host_memory="8MiB")
    with pytest.raises(castor.UsageError, match="boosted already"):
        castor.Booster(gemini).boost(model.layers)


def test_a_copy_is_an_ordinary_optimizer() -> None:
    model = tower()
    booster, optimizer = plain(model, max_norm=MAX_NORM)
    copied = copy.deepcopy(optimizer)
    with pytest.raises(castor.UsageError, match="not boosted"):
        booster.backward(tower_loss(model, 0), copied)


def test_an_optimizer_is_boosted_once_and_lbfgs_never() -> None:
    model = tower()
    _, optimizer = plain(model)
    with pytest.raises(castor.UsageError, match="this AdamW is boosted already"):
        boost(tower(), optimizer)
    other = tower()
    with pytest.raises(NotImplementedError, match="LBFGS evaluates the model inside step"):
        boost(other, torch.optim.LBFGS(other.parameters()))
    assert "forward" not in vars(other)


NAMES = {"ddp": castor.TorchDDPPlugin, "fsdp": castor.TorchFSDPPlugin}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"device_memory": "8GiB"}, TypeError, "no argument 'device_memory': it is for castor's"),
        ({"placement_policy": "auto"}, TypeError, "no argument 'placement_policy'"),
        ({"tp_size": 2}, TypeError, "no argument 'tp_size'"),
        ({"bucket": 3}, TypeError, "no argument 'bucket'"),
        ({"precision": "fp16"}, NotImplementedError, "fp16.* use 'bf16', or GeminiPlugin"),
        ({"precision": "fp8"}, ValueError, "precision is 'fp8'; give 'fp32' or 'bf16'"),
        ({"max_norm": -1.0}, ValueError, "max_norm is -1.0; it must be at least 0"),
        ({"max_norm": "1"}, TypeError, "max_norm is '1'; give a number"),
        ({"norm_type": 1.0}, NotImplementedError, "norm_type=1.0"),
        ({"nonfinite": "warn"}, ValueError, "nonfinite is 'warn'"),
        ({"device": "meta"}, NotImplementedError, "device='meta' is not supported"),
        ({"device": "gpu"}, ValueError, "device is 'gpu'; choose 'cpu', 'cuda' or the number"),
        ({"fp8_communication": True}, NotImplementedError, "fp8_communication may only be False"),
    ],
)
def test_what_they_do_not_do_is_refused_by_name(
    name: str, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        NAMES[name](**{"device": "cpu"} | settings)


@pytest.mark.parametrize(
    ("name", "settings", "kind", "message"),
    [
        ("ddp", {"check_reduction": True}, NotImplementedError, "torch has deprecated it"),
        ("ddp", {"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb is 0; it must be above 0"),
        ("ddp", {"bucket_cap_mb": "25"}, TypeError, "bucket_cap_mb is '25'; give a number"),
        ("ddp", {"static_graph": 1}, TypeError, "static_graph is 1; give True or False"),
        ("fsdp", {"sharding_strategy": 1}, NotImplementedError, "give reshard_after_forward"),
        ("fsdp", {"auto_wrap_policy": len}, NotImplementedError, "blocks are all-gathered one by"),
        ("fsdp", {"cpu_offload": 1}, TypeError, "give True, False or a torch"),
        ("fsdp", {"mixed_precision": "bf16"}, TypeError, "MixedPrecisionPolicy"),
        ("fsdp", {"sync_module_states": None}, TypeError, "sync_module_states is None"),
        ("fsdp", {"reshard_after_forward": 0.5}, TypeError, "reshard_after_forward is 0.5"),
    ],
)
def test_arguments_of_one_are_checked(
    name: str, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        NAMES[name](device="cpu", **settings)


def test_precision_is_said_once() -> None:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="both say what passes compute in"):
        castor.TorchFSDPPlugin(device="cpu", precision="bf16", mixed_precision=policy)


def test_colossal_ais_defaults_are_taken() -> None:
    castor.TorchDDPPlugin(
        device="cpu", broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=False,
        check_reduction=False, gradient_as_bucket_view=False, static_graph=False,
        fp8_communication=False,
    )  # fmt: skip
    castor.TorchFSDPPlugin(
        device="cpu", process_group=None, sharding_strategy=None, cpu_offload=None,
        auto_wrap_policy=None, backward_prefetch=None, mixed_precision=None, ignored_modules=None,
        param_init_fn=None, sync_module_states=False, fp8_communication=False,
    )  # fmt: skip


class Odd(nn.Module):
    """With a parameter that fully_shard does not take."""

    def __init__(self, param: torch.Tensor) -> None:
        super().__init__()
        self.odd = nn.Parameter(param)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Odd(torch.tensor(1.0)), "parameter 'odd' has no dimension"),
        (Odd(torch.ones(2, 3).t()), "parameter 'odd' is not contiguous"),
    ],
)
def test_what_fully_shard_does_not_shard_is_refused_before_it(
    model: nn.Module, message: str
) -> None:
    with pytest.raises(castor.UsageError, match=message):
        castor.Booster(castor.TorchFSDPPlugin(device="cpu")).boost(model)


def test_fully_shard_is_given_no_hybrid_adam_no_states_and_no_adapters() -> None:
    plugin = castor.TorchFSDPPlugin(device="cpu")
    model = tower()
    with pytest.raises(NotImplementedError, match=r"HybridAdam steps full.*torch.optim.AdamW"):
        castor.Booster(plugin).boost(model, castor.HybridAdam(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    model(**tower_batch(0)).backward()
    optimizer.step()
    with pytest.raises(castor.UsageError, match="has states of full parameters"):
        castor.Booster(plugin).boost(model, optimizer)
    adapted = peft.get_peft_model(tower(), peft.LoraConfig(target_modules=["head"]))
    with pytest.raises(NotImplementedError, match="does not shard PeftModels"):
        castor.Booster(plugin).boost(adapted)
    assert type(model).__name__ == "Tower"
    assert not torch.distributed.is_initialized()


def test_frameworks_loops_are_refused_by_name() -> None:
    from castor.integrations.common import check_plugin

    with pytest.raises(TypeError, match="was given a TorchDDPPlugin"):
        check_plugin(castor.TorchDDPPlugin(device="cpu"), "the loop")
