"""castor.accelerate and castor.Config: boost, loader and settings in one call."""

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import castor
from accelerator import Accelerator
from castor import AsyncLoader, Config
from castor.plugins import GeminiPlugin, HybridParallelPlugin
from script_ranks import run_ranks
from zoo import tower, tower_batch

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "device_memory": "400KiB",
    "host_memory": "64MiB",
    "chunk_bytes": "16KiB",
    "precision": "fp32",
}


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches() -> DataLoader[Any]:
    data = [tower_batch(seed) for seed in range(8)]
    loader: DataLoader[Any] = DataLoader(data, batch_size=None, shuffle=True)  # type: ignore[arg-type]
    return loader


# --- accelerate ---------------------------------------------------------------------------------


def losses(model: Any, optimizer: Any, loader: Any, scheduler: Any, booster: Any) -> list[float]:
    found = []
    for batch in loader:
        loss = model(**batch)
        booster.backward(loss, optimizer) if booster else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found.append(loss.item())
    return found


def test_losses_are_the_plain_loops() -> None:
    found = []
    for castors in (False, True):
        torch.manual_seed(4)
        model = tower()
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loader: Any = batches()
        booster = None
        if castors:
            given = (model, optimizer, loader, scheduler)
            model, optimizer, loader, scheduler = castor.accelerate(*given, Config(**SETTINGS))
            booster = castor.booster_of(model)
            assert (model, optimizer, loader.loader, scheduler) == given
        found.append(losses(model, optimizer, loader, scheduler, booster))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert booster is not None
    assert booster.report(model).device_budget_bytes == 400 * 1024


def test_what_was_given_comes_back_in_order() -> None:
    config = Config(**SETTINGS)
    model = tower()
    assert castor.accelerate(model, config=config) is model
    model, loader = castor.accelerate(tower(), dataloader=batches(), config=config)
    assert isinstance(loader, AsyncLoader)
    model = tower()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    found = castor.accelerate(model, optimizer, lr_scheduler=scheduler, config=config)
    assert found == (model, optimizer, scheduler)


def test_an_optimizer_may_be_made_afterwards() -> None:
    found = []
    for castors in (False, True):
        model = tower()
        if castors:
            model = castor.accelerate(model, config=Config(**SETTINGS))
        optimizer, taken = adamw(model), []
        for seed in range(4):
            loss = model(**tower_batch(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(loss.item())
        found.append(taken)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_run_goes_on_behind_its_last_batch(tmp_path: Path) -> None:
    def start() -> Any:
        torch.manual_seed(4)
        model = tower()
        return castor.accelerate(model, adamw(model), batches(), config=Config(**SETTINGS, depth=3))

    def train(model: Any, optimizer: Any, steps: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            loss = model(**next(steps))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model, optimizer, loader = start()
    steps = iter(loader)
    train(model, optimizer, steps, 3)
    castor.booster_of(model).save(tmp_path / "run", model, optimizer, dataloader=loader)
    expected = train(model, optimizer, steps, 5)
    model, optimizer, loader = start()
    castor.booster_of(model).load(tmp_path / "run", model, optimizer, dataloader=loader)
    assert train(model, optimizer, iter(loader), 5) == expected


def test_the_loader_has_the_configs_options() -> None:
    data = [{"input_ids": torch.ones(2, 3, dtype=torch.int64)}]
    config = Config(**SETTINGS, depth=0, buckets=(4, 8), pad_values={"input_ids": 7})
    _, loader = castor.accelerate(tower(), dataloader=data, config=config)
    assert next(iter(loader))["input_ids"].tolist() == [[1, 1, 1, 7]] * 2
    own = AsyncLoader(data, device="cpu")
    assert castor.accelerate(tower(), dataloader=own, config=Config(**SETTINGS))[1] is own


def test_options_that_nobody_would_have_are_refused_before_anything_is_boosted() -> None:
    model = tower()
    loader = AsyncLoader([1], device="cpu")
    for given, what in (({}, "no dataloader"), ({"dataloader": loader}, "an AsyncLoader, which")):
        with pytest.raises(castor.UsageError, match=f"has depth for a loader.*{what}"):
            castor.accelerate(model, config=Config(**SETTINGS, depth=1), **given)
    with pytest.raises(TypeError, match=r"config is a dict; give a castor.Config"):
        castor.accelerate(model, config=SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="depth is -1"):
        castor.accelerate(model, dataloader=[1], config=Config(**SETTINGS, depth=-1))
    with pytest.raises(TypeError, match="optimizer is a DataLoader"):  # TorchAcc's order
        castor.accelerate(model, batches(), config=Config(**SETTINGS))
    with pytest.raises(castor.UsageError, match="this Tower is not boosted"):
        castor.booster_of(model)
    castor.accelerate(model, config=Config(**SETTINGS))


def test_the_booster_of_any_boosted_model_is_found_and_keeps_no_model() -> None:
    booster = castor.Booster(GeminiPlugin(**SETTINGS))
    model = tower()
    booster.boost(model)
    assert castor.booster_of(model) is booster
    compiled: Any = torch.compile(model, backend="eager")
    assert castor.booster_of(compiled) is booster
    other = castor.accelerate(tower(), config=Config(**SETTINGS))
    assert castor.booster_of(other) is not booster
    gone, its_booster = weakref.ref(other), weakref.ref(castor.booster_of(other))
    del other
    gc.collect()
    assert gone() is None
    assert its_booster() is None


def test_a_model_that_only_a_plugin_has_configured_has_no_booster() -> None:
    model = tower()
    GeminiPlugin(**SETTINGS).configure(model, [])
    with pytest.raises(castor.UsageError, match="was boosted by no Booster"):
        castor.booster_of(model)


RANKS = """
import torch
import castor

config = castor.Config(device="cpu", device_memory="1MiB", host_memory="64MiB", depth=2)
data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4) / 64, torch.ones(16, 1))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = config.plugin().prepare_dataloader(data, batch_size=2, shuffle=True, seed=3)
model, optimizer, loader = castor.accelerate(model, optimizer, loader, config=config)
for epoch in range(2):
    loader.set_epoch(epoch)
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
report = castor.booster_of(model).report()
if report.rank == 0:
    print(report.ranks, len(loader), sum(p.double().sum().item() for p in model.parameters()))
"""


def test_ranks_train_on_their_parts_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    # One process that takes what two ranks take together.
    (tmp_path / "alone.py").write_text(RANKS.replace("batch_size=2", "batch_size=4"))
    found = []
    for size, script in ((2, "train.py"), (1, "alone.py")):
        outcomes = run_ranks(tmp_path, size, script)
        assert not any(outcome.code for outcome in outcomes), outcomes
        found.append(outcomes[0].output.split())
    assert (found[0][:2], found[1][:2]) == (["2", "4"], ["1", "4"])
    assert float(found[0][2]) == pytest.approx(float(found[1][2]), rel=1e-6)


def test_batches_come_to_the_models_gpu(gpu: Accelerator) -> None:
    # A real one's cuBLAS takes 32 MiB for each thread that multiplies.
    config = Config(device="cuda", precision="fp32", host_memory="64MiB", device_memory="256MiB")
    model, loader = castor.accelerate(tower(), dataloader=batches(), config=config)
    seen = 0
    for batch in loader:
        assert {value.device for value in batch.values()} == {gpu.device}
        model(**batch).backward()
        seen += 1
    assert seen == 8


# --- Config -------------------------------------------------------------------------------------


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"has no argument 'dvice', 'bucket'; .*depth"):
        Config(dvice="cpu", bucket=[1], precision="fp32")
    with pytest.raises(TypeError, match="no argument 'loader'"):
        Config(loader=[])


def test_arguments_are_checked_by_whom_they_belong_to() -> None:
    with pytest.raises(ValueError, match="precision"):
        Config(device="cpu", precision="fp8").plugin()
    with pytest.raises(NotImplementedError, match="hidden_dim=2 is not supported yet"):
        Config(device="cpu", hidden_dim=2).plugin()


def test_the_plugin_is_the_one_that_has_the_arguments() -> None:
    plain, hybrid = Config(**SETTINGS).plugin(), Config(**SETTINGS, tp_size=1).plugin()
    assert type(plain) is GeminiPlugin
    assert type(hybrid) is HybridParallelPlugin
    assert plain.config == GeminiPlugin(**SETTINGS).config == hybrid.config
    assert type(Config(device="cpu", zero_stage=1).plugin()) is GeminiPlugin


@pytest.mark.parametrize("name", ["castor.json", "castor.yaml"])
def test_a_file_gives_the_same_config(tmp_path: Path, name: str) -> None:
    pytest.importorskip("yaml")
    config = Config(
        **SETTINGS | {"device": torch.device("cpu")},
        nvme_path=[tmp_path],
        activations={"layers.*": "recompute"},
        growth_factor=1e-5,
        seed=None,
        buckets=range(8, 33, 8),
        pad_values={"labels": -100, "x": None},
    )
    config.save(tmp_path / name)
    read = Config.read(tmp_path / name)
    assert read == config
    assert read.loader_arguments() == {
        "buckets": [8, 16, 24, 32],
        "pad_values": {"labels": -100, "x": None},
    }
    assert read.arguments["nvme_path"] == [str(tmp_path)]
    assert type(read.arguments["growth_factor"]) is float


def test_castor_run_reads_what_it_writes(tmp_path: Path) -> None:
    from castor.launch import read_settings

    path = tmp_path / "castor.json"
    config = Config(**SETTINGS)
    config.save(path)
    assert read_settings(path, {}, []) == SETTINGS == json.loads(path.read_text())
    assert Config.read(path) == config


def test_castor_run_refuses_a_loaders_options_by_name(tmp_path: Path) -> None:
    from castor.integrations.common import plugin_of

    config = Config(**SETTINGS, depth=3)
    with pytest.raises(TypeError, match="GeminiPlugin has no argument 'depth'"):
        plugin_of(config.arguments, {}, "the loop clips", tmp_path)


def test_a_value_that_no_file_holds_is_named(tmp_path: Path) -> None:
    for value in (object(), {1: "recompute"}):
        with pytest.raises(castor.UsageError, match=r"castor.json cannot hold activations="):
            Config(activations=value).save(tmp_path / "castor.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json is no JSON"),
        ("a.json", "[1]", "a.json holds a list: give names and values"),
        ("a.yaml", "a: [", "a.yaml is no YAML"),
    ],
)
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(castor.UsageError, match=message):
        Config.read(tmp_path / name)


def test_yaml_without_pyyaml_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(castor.UsageError, match="YAML needs pyyaml; install it, or give a file"):
        Config(**SETTINGS).save(tmp_path / "castor.yaml")
