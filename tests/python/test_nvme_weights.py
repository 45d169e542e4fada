"""Parameters and gradients on NVMe, where the host is too small for them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import castor
import grids
from helpers import (
    FORMATS_AND_OVERLAPS,
    ON_THE_CPU_DEVICE,
    Boosted,
    assert_equal,
    boost,
    copies,
    equal,
    exact_state,
    tight_memory,
    train_on,
)
from stored_tower import BLOCK, CHUNK, WIDTH, go_on_wide, largest_chunk, on_nvme, wide
from zoo import CASES, tower_batch


def train(
    name: str, memory: int = 2**26, *, micro_batches: int = 1, steps: int = 3, **settings: Any
) -> tuple[list[float], list[torch.Tensor], castor.MemoryReport]:
    case = CASES[name]
    boosted = boost(case.model(), memory, chunk_bytes=CHUNK, **settings)
    losses = train_on(boosted, case, steps=steps, micro_batches=micro_batches)
    return losses, exact_state(boosted), boosted.report()


def assert_same_bits(name: str, path: Path, memory: int = 2**26, **settings: Any) -> None:
    expected = train(name, memory, **settings)
    chunk_bytes = chunk_bytes_of(name, settings.get("precision", "fp32"))
    actual = train(name, memory, **settings, **on_nvme(path, chunk_bytes, **settings))
    assert actual[0] == expected[0]
    assert_equal(actual[1], expected[1])
    report = actual[2]
    assert report.nvme_weight_bytes > 0
    assert report.host_bytes <= report.host_budget_bytes


def chunk_bytes_of(name: str, precision: str) -> int:
    return largest_chunk(boost(CASES[name].model(), chunk_bytes=CHUNK, precision=precision))


# --- parity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", grids.some(sorted(CASES), "gpt2", "llama", "mixtral", "t5"))
def test_a_model_of_the_parity_set_trains_to_the_same_bits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    memory = tight_memory(
        case.model, lambda model, seed: case.loss(model(**case.batch(seed)), case.batch(seed))
    )
    assert_same_bits(name, tmp_path, memory)


@pytest.mark.parametrize(("precision", "state_format", "overlap"), FORMATS_AND_OVERLAPS)
def test_every_format_and_overlap_gives_the_same_bits(
    precision: str, state_format: str, overlap: str, tmp_path: Path
) -> None:
    assert_same_bits(
        "gpt2",
        tmp_path,
        precision=precision,
        optim_state_format=state_format,
        overlap=overlap,
        nonfinite="raise" if precision == "fp16" else "ignore",
        enable_gradient_accumulation=overlap != "backward",
    )


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_copies_over_a_link_read_ahead_of_the_device(overlap: str, tmp_path: Path) -> None:
    assert_same_bits(
        "gpt2",
        tmp_path,
        memory=2**21,
        link_bandwidth="4GB/s",
        max_prefetch=4,
        steps=5,
        overlap=overlap,
        nonfinite="ignore",
        enable_gradient_accumulation=overlap != "backward",
    )


def test_gradient_checkpointing_runs_modules_again_in_backward(tmp_path: Path) -> None:
    def run(**settings: Any) -> list[torch.Tensor]:
        case = CASES["llama"]
        boosted = boost(case.model(checkpointing=True), chunk_bytes=CHUNK, **settings)
        for step in range(3):
            batch = case.batch(step)
            boosted.step(case.loss(boosted.model(**batch), batch))
        return copies(boosted.model.parameters())

    assert_equal(run(**on_nvme(tmp_path, chunk_bytes_of("llama", "fp32"))), run())


# --- what users do beside training ----------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_weights_are_read_and_edited_between_steps(overlap: str, tmp_path: Path) -> None:
    def run(path: Path | None) -> list[torch.Tensor]:
        boosted = wide(path, precision="bf16", overlap=overlap)
        average = {name: p.detach().clone() for name, p in boosted.model.named_parameters()}
        for step in range(3):
            go_on_wide(boosted, first=step, steps=1)
            with torch.no_grad():
                for name, param in boosted.model.named_parameters():
                    average[name].lerp_(param, 0.1)
                    param.data.clamp_(-0.2, 0.2)  # through an alias
                    param.view(-1)[1:4].mul_(0.5)  # through a view
                    param.view(-1)[0] = 0.125
                    if param.dim() == 2:
                        param[0].copy_(param[1])  # one tensor as source and target
            assert all(equal(p, p.detach().clone()) for p in boosted.model.parameters())
        return [*average.values(), *exact_state(boosted)]

    assert_equal(run(tmp_path), run(None))


def test_gradients_are_read_changed_and_accumulated(tmp_path: Path) -> None:
    def run(path: Path | None) -> list[torch.Tensor]:
        boosted = wide(path)
        params = list(boosted.model.parameters())
        seen = []
        for step in range(3):
            for _ in range(2):
                loss = boosted.model(**tower_batch(step, width=WIDTH))
                boosted.booster.backward(loss, boosted.optimizer)
            seen += [param.grad.clone() for param in params]
            for param in params:
                param.grad.mul_(0.5)
                param.grad = param.grad + 1e-3  # memory of its own
            boosted.optimizer.step()
            seen += [param.grad.norm() for param in params]  # still there
            boosted.optimizer.zero_grad(set_to_none=step == 1)
        return [*seen, *copies(params)]

    assert_equal(run(tmp_path), run(None))


def test_a_weight_may_be_used_outside_its_module(tmp_path: Path) -> None:
    def run(path: Path | None) -> list[torch.Tensor]:
        boosted = wide(path)
        weights = [p for p in boosted.model.parameters() if p.dim() == 2]
        for step in range(3):
            batch = tower_batch(step, width=WIDTH)
            loss = boosted.model(**batch)
            x = batch["x"].to(loss.device)
            for weight in weights[::5]:  # not through a module: read where it is
                loss = loss + torch.nn.functional.linear(x, weight).square().mean()
                loss = loss + 1e-3 * (weight * weight).sum()
            boosted.step(loss)
        return copies(boosted.model.parameters())

    assert_equal(run(tmp_path), run(None))


def test_a_state_dict_is_read_copied_and_loaded(tmp_path: Path) -> None:
    plain = wide()
    go_on_wide(plain)
    stored = wide(tmp_path)
    stored.model.load_state_dict(plain.model.state_dict())
    assert_equal(copies(stored.model.parameters()), copies(plain.model.parameters()))
    state = stored.model.state_dict()  # kept: tensors over memory that comes and goes
    assert all(equal(state[key], value) for key, value in plain.model.state_dict().items())
    copied = {key: value.clone() for key, value in state.items()}
    go_on_wide(stored, steps=1)
    assert not all(equal(state[key], copied[key]) for key in state)
    twin = copy.deepcopy(stored.model)
    assert_equal(copies(twin.parameters()), copies(stored.model.parameters()))
    stored.model.load_state_dict(copied)
    assert_equal(copies(stored.model.parameters()), copies(plain.model.parameters()))


def test_an_address_is_refused_not_invented(tmp_path: Path) -> None:
    stored = wide(tmp_path)
    go_on_wide(stored, steps=1)
    param = next(stored.model.parameters())
    # An operator copies a GPU's tensor for these.
    of_the_host = (param.detach().numpy, param.detach().tolist) if ON_THE_CPU_DEVICE else ()
    for read in (
        param.data_ptr,
        *of_the_host,
        lambda: torch.save(param, tmp_path / "model.pt"),
        lambda: torch.save(stored.model, tmp_path / "model.pt"),
        lambda: torch.save(stored.model.state_dict(keep_vars=True), tmp_path / "model.pt"),
    ):
        with pytest.raises(RuntimeError, match=r"on NVMe.*\.clone\(\)"):
            read()
    assert param.detach().clone().cpu().numpy().shape == tuple(param.shape)
    go_on_wide(stored, first=1, steps=1)


def test_what_is_left_of_a_model_that_was_dropped_says_so(tmp_path: Path) -> None:
    stored = wide(tmp_path)
    param = next(stored.model.parameters())
    del stored
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="until their model was dropped"):
        param.sum()


def test_evaluation_reads_from_nvme_too(tmp_path: Path) -> None:
    def run(path: Path | None) -> list[float]:
        boosted = wide(path)
        losses = go_on_wide(boosted)
        boosted.model.eval()
        with torch.inference_mode():
            losses += [boosted.model(**tower_batch(k, width=WIDTH)).item() for k in range(3)]
        return losses + go_on_wide(boosted.model.train() and boosted, first=3)

    assert run(tmp_path) == run(None)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state_format", [pytest.param("fp32", marks=pytest.mark.whole), "split_int8"]
)
def test_a_checkpoint_goes_between_runs_with_and_without(state_format: str, tmp_path: Path) -> None:
    settings = {"precision": "bf16", "optim_state_format": state_format}
    (tmp_path / "nvme").mkdir()
    stored, plain = wide(tmp_path / "nvme", **settings), wide(**settings)
    for name, run in (("stored", stored), ("plain", plain)):
        go_on_wide(run)
        run.booster.save(tmp_path / name, run.model, run.optimizer)
    for file in (tmp_path / "plain").rglob("*.safetensors"):
        twin = tmp_path / "stored" / file.relative_to(tmp_path / "plain")
        mine, theirs = load_file(twin), load_file(file)
        assert mine.keys() == theirs.keys()
        assert all(equal(mine[key], theirs[key]) for key in theirs)
    expected = go_on_wide(plain, first=3)
    assert go_on_wide(stored, first=3) == expected
    del stored
    for name, path in (("stored", None), ("plain", tmp_path / "nvme")):
        again = wide(path, **settings)
        go_on_wide(again, first=50, steps=2)
        again.booster.load(tmp_path / name, again.model, again.optimizer)
        assert go_on_wide(again, first=3) == expected


def test_damaged_weights_are_named_and_a_checkpoint_heals_them(tmp_path: Path) -> None:
    scratch = tmp_path / "nvme"
    scratch.mkdir()
    stored = wide(scratch)
    go_on_wide(stored, steps=1)
    stored.booster.save(tmp_path / "saved", stored.model, stored.optimizer)
    expected = go_on_wide(wide_from(tmp_path / "saved"), first=1)
    file = scratch / "castor.scratch"
    with file.open("r+b") as opened:
        size = file.stat().st_size
        for offset in range(BLOCK, size, 2048):
            opened.seek(offset)
            opened.write(b"\x5a")
    with pytest.raises(castor.CorruptionError, match=r"(parameters|gradients) of chunk \d+"):
        go_on_wide(stored, first=1)
    stored.booster.load(tmp_path / "saved", stored.model, stored.optimizer)
    stored.optimizer.zero_grad()
    assert go_on_wide(stored, first=1) == expected


def wide_from(checkpoint: Path) -> Boosted:
    boosted = wide()
    boosted.booster.load(checkpoint, boosted.model, boosted.optimizer)
    return boosted
