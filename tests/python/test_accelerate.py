"""Loops over accelerate.Accelerator, with castor and without."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs, ProjectConfiguration, find_executable_batch_size
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import accelerate_cases
import castor
from castor.integrations import accelerate as integration
from helpers import engine_of
from zoo import CASES

STEPS = 6
TIGHT = {"device": "cpu", "device_memory": "200KiB", "host_memory": "64MiB", "chunk_bytes": "16KiB"}


def plugin(**settings: Any) -> castor.GeminiPlugin:
    return castor.GeminiPlugin(**(TIGHT | settings))


@pytest.fixture(autouse=True)
def first_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "input_ids": torch.randint(0, 64, (8,), generator=generator),
            "labels": torch.randint(0, 64, (8,), generator=generator),
        }
        for _ in range(64)
    ]


@dataclass
class Run:
    """What a loop has."""

    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any

    def train(self, steps: int) -> list[tuple[float, float]]:
        """(loss, gradient norm) of each micro-batch, two of which make a step."""
        found = []
        batches = iter(self.loader)
        for _ in range(2 * steps):
            batch = next(batches)
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                norm = 0.0
                if self.accelerator.sync_gradients:
                    clipped = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    norm = clipped.item()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            found.append((self.accelerator.gather(loss.detach()).mean().item(), norm))
        return found

    @property
    def weights(self) -> list[torch.Tensor]:
        model = self.accelerator.unwrap_model(self.model)
        return [param.detach().clone() for param in model.parameters()]


def begin(kind: type[Accelerator], *, apart: bool = False, **keywords: Any) -> Run:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = kind(cpu=True, gradient_accumulation_steps=2, **keywords)
    model: nn.Module = CASES["llama"].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    generator = torch.Generator().manual_seed(5)
    loader: Any = DataLoader(data(), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    if apart:
        own = [accelerator.prepare(one) for one in (model, optimizer, loader, scheduler)]
    else:
        own = accelerator.prepare(model, optimizer, loader, scheduler)
    return Run(accelerator, *own)


def on_castor(**settings: Any) -> Any:
    return integration.accelerator(Accelerator, plugin(**settings))


@pytest.mark.parametrize("apart", [False, True])
def test_a_loop_computes_what_it_did(apart: bool) -> None:
    plain = begin(Accelerator)
    expected, weights = plain.train(STEPS), plain.weights
    run = begin(on_castor(), apart=apart)
    found = run.train(STEPS)
    assert engine_of(run.model)
    assert run.accelerator.castor.report(run.model).divergent_steps == 0
    for (loss, norm), (plain_loss, plain_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-5)
        assert norm == pytest.approx(plain_norm, rel=1e-4)
    for weight, reference in zip(run.weights, weights, strict=True):
        assert (weight - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16", "optim_state_format": "fp32"},
        {"precision": "bf16", "optim_state_format": "split_int8"},
        {"precision": "fp16"},
        {"overlap": "forward"},
    ],
)
def test_a_saved_state_goes_on_bitwise(settings: dict[str, Any], tmp_path: Path) -> None:
    precision = {"mixed_precision": settings["precision"]} if "precision" in settings else {}
    first = begin(on_castor(**settings), **precision)
    first.train(2)
    first.accelerator.save_state(tmp_path / "state")
    expected, weights = first.train(2), first.weights

    again = begin(on_castor(**settings), **precision)
    assert again.accelerator.mixed_precision == settings.get("precision", "no")
    again.train(1)
    again.accelerator.load_state(tmp_path / "state")
    assert again.train(2) == expected
    assert all(map(torch.equal, again.weights, weights))


def test_steps_that_overflow_in_fp16_are_left_out() -> None:
    options = [GradScalerKwargs(init_scale=2.0**36)]
    run = begin(on_castor(precision="fp16"), mixed_precision="fp16", kwargs_handlers=options)
    before = run.weights
    found = run.train(1)
    assert not math.isfinite(found[1][1])
    assert run.optimizer.step_was_skipped
    assert run.scheduler.get_last_lr() == [pytest.approx(1e-2 / 3)]
    assert all(map(torch.equal, run.weights, before))
    assert run.accelerator.scaler.get_scale() == 2.0**35
    plain = begin(Accelerator).train(STEPS)
    options = [GradScalerKwargs(init_scale=2.0**12)]
    run = begin(on_castor(precision="fp16"), mixed_precision="fp16", kwargs_handlers=options)
    found = run.train(STEPS - 2)  # later ones differ more and more, by the processor's kernels
    for (loss, norm), (its_loss, its_norm) in zip(found, plain[: len(found)], strict=True):
        assert loss == pytest.approx(its_loss, rel=5e-3)
        assert norm == pytest.approx(its_norm, rel=2e-2)


def test_one_optimizer_of_two_models_and_then_another_one(tmp_path: Path) -> None:
    def run_with(kind: type[Accelerator]) -> tuple[Any, list[Any], list[float]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        accelerator = kind(cpu=True)
        first, second = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        held = [*first.parameters(), *second.parameters()]
        losses, made = [], []
        for rate in (1e-2, 1e-3):
            optimizer = torch.optim.AdamW(held, lr=rate)
            if not made:
                first, second, optimizer = accelerator.prepare(first, second, optimizer)
            else:
                optimizer = accelerator.prepare(optimizer)
            made.append(optimizer)
            for step in range(3):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                loss = second(first(x)).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(held, 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return accelerator, made, losses

    *_, expected = run_with(Accelerator)
    accelerator, made, found = run_with(on_castor())
    assert found == pytest.approx(expected, rel=1e-5)
    accelerator._optimizers = made[1:]
    accelerator.save_state(str(tmp_path / "state"))
    entries = made[1].state.values()
    kept = [entry["exp_avg"].clone() for entry in entries]
    for entry in entries:
        entry["exp_avg"].zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert all(map(torch.equal, (entry["exp_avg"] for entry in made[1].state.values()), kept))


def test_several_optimizers_share_a_model(tmp_path: Path) -> None:
    def run_with(kind: type[Accelerator]) -> tuple[Any, Any, list[Any], list[float]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = kind(cpu=True)
        model: nn.Module = CASES["llama"].model()
        blocks = [p for name, p in model.named_parameters() if ".layers." in name]
        others = [p for name, p in model.named_parameters() if ".layers." not in name]
        made = torch.optim.SGD(blocks, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=1e-2)
        loader = DataLoader(data(), batch_size=2)  # type: ignore[arg-type]
        model, *optimizers, loader = accelerator.prepare(model, *made, loader)
        losses = []
        for batch in list(loader)[:STEPS]:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return accelerator, model, optimizers, losses

    *_, expected = run_with(Accelerator)
    accelerator, model, optimizers, found = run_with(on_castor())
    assert found == pytest.approx(expected, rel=1e-5)
    assert accelerator.castor.report(model).steps == STEPS
    accelerator.save_state(str(tmp_path / "state"))
    momenta = [entry["momentum_buffer"].clone() for entry in optimizers[0].state.values()]
    for entry in optimizers[0].state.values():
        entry["momentum_buffer"].zero_()
    accelerator.load_state(str(tmp_path / "state"))
    loaded = [entry["momentum_buffer"] for entry in optimizers[0].state.values()]
    assert all(map(torch.equal, loaded, momenta))


def test_a_batch_that_the_budget_has_no_room_for_is_made_smaller() -> None:
    tried: list[int] = []

    def search(accelerator: Accelerator) -> float:
        @find_executable_batch_size(starting_batch_size=7)
        def train(batch_size: int) -> float:
            tried.append(batch_size)
            accelerator.free_memory()
            model: nn.Module = CASES["llama"].model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            loader = DataLoader(data(), batch_size=batch_size)  # type: ignore[arg-type]
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for batch in loader:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return float(loss.item())

        return float(train())

    assert search(on_castor()(cpu=True)) > 0
    assert tried[0] == 7
    assert 2 <= tried[-1] < 7
    with pytest.raises(castor.OutOfMemoryError, match="give device_memory at least"):
        search(on_castor(device_memory="8KiB")(cpu=True))  # no batch is at fault


def test_states_that_are_named_for_the_loop_are_found_again(tmp_path: Path) -> None:
    def project() -> ProjectConfiguration:
        return ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)

    first = begin(on_castor(), project_config=project())
    for _ in range(3):
        first.train(1)
        first.accelerator.save_state()
    weights = first.weights
    again = begin(on_castor(), project_config=project())
    again.accelerator.load_state()
    assert all(map(torch.equal, again.weights, weights))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["checkpoint_1", "checkpoint_2"]


def test_a_plain_state_goes_on_here_and_ours_is_no_plain_one(tmp_path: Path) -> None:
    plain = begin(Accelerator)
    plain.train(2)
    plain.accelerator.save_state(tmp_path / "plain")
    expected = plain.train(2)
    run = begin(on_castor())
    run.train(1)  # the loader's second order comes next
    run.accelerator.load_state(tmp_path / "plain")
    for (loss, _), (plain_loss, _) in zip(run.train(2), expected, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-5)

    run.accelerator.save_state(tmp_path / "own")
    saved = load_file(tmp_path / "own" / "model.safetensors")
    assert len(saved) == len(run.model.state_dict())
    with pytest.raises(FileNotFoundError, match="optimizer"):
        begin(Accelerator).accelerator.load_state(tmp_path / "own")


def test_a_model_that_does_not_train_is_left_to_accelerate() -> None:
    run = begin(on_castor())
    reference = CASES["llama"].model().requires_grad_(False)
    assert run.accelerator.prepare(reference) is reference
    assert type(reference).__name__ == "LlamaForCausalLM"
    run.train(1)
    with pytest.raises(castor.UsageError, match="not boosted"):
        engine_of(reference)


def test_what_would_train_without_castor_is_refused() -> None:
    accelerator = on_castor()(cpu=True)
    model = CASES["llama"].model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(castor.UsageError, match="AdamW holds no parameter of a model that"):
        accelerator.prepare(optimizer)
    model = accelerator.prepare(model)
    batch = {key: value[None] for key, value in data()[0].items()}
    with pytest.raises(castor.UsageError, match="castor trains nothing here"):
        accelerator.backward(model(**batch).loss)


def test_settings_that_accelerator_and_plugin_both_have_are_compared() -> None:
    with pytest.raises(castor.UsageError, match="mixed_precision='bf16' and GeminiPlugin"):
        on_castor()(cpu=True, mixed_precision="bf16")
    with pytest.raises(castor.UsageError, match=r"max_norm=1.0, and accelerator.clip_grad_norm_"):
        on_castor(max_norm=1.0)
    with pytest.raises(castor.UsageError, match=r"initial_scale=1024.0.* torch.amp.GradScaler"):
        on_castor(precision="fp16", initial_scale=1024.0)


def test_another_accelerator_than_is_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = on_castor()
    with pytest.raises(castor.UsageError, match="Accelerator boosts with castor already"):
        integration.accelerator(kind, plugin())
    with pytest.raises(castor.UsageError, match="not a class of accelerate"):
        integration.accelerator(int, plugin())  # type: ignore[type-var]
    monkeypatch.delattr(Accelerator, "prepare_optimizer")
    with pytest.raises(ImportError, match="Accelerator without prepare_optimizer: castor"):
        integration.accelerator(Accelerator, plugin())


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.whole), 2])
def test_a_script_as_it_is_trains_under_castor_run(ranks: int, tmp_path: Path) -> None:
    accelerate_cases.plain(tmp_path / "plain", ranks)
    (tmp_path / "castor.yaml").write_text("device_memory: 300KiB\nhost_memory: 64MiB\n")
    config = ("--config", str(tmp_path / "castor.yaml"))
    output = accelerate_cases.under_castor_run(tmp_path / "own", ranks, *config)
    said = f"done on {ranks} DistributedDataParallel", "grouped at exit: False"
    assert output.splitlines()[-2:] == list(said)
    assert (tmp_path / "own" / "castor.json").exists()
    losses = torch.load(tmp_path / "own" / "losses.pt")
    assert losses == pytest.approx(torch.load(tmp_path / "plain" / "losses.pt"), rel=1e-5)
    weights = load_file(tmp_path / "own" / "model.safetensors")
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert (value - expected[name]).norm() <= 1e-5 * expected[name].norm()
