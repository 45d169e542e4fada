"""Lightning's Trainer on castor and without it: `make integration`."""

from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import castor  # noqa: E402
from castor.integrations.lightning import CastorStrategy, _on_castor  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, of torch and of idle cores

BUDGET = {"device": "cpu", "device_memory": "320KiB", "host_memory": "64MiB"}


class Language(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A Llama; what its steps saw is in `losses` and `seen`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
                num_attention_heads=4, num_key_value_heads=2,
            )
        )  # fmt: skip
        self.losses: list[float] = []
        self.seen: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        loss = self(tokens)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, tokens: torch.Tensor, _: int) -> None:
        loss = self(tokens)
        self.seen.append(loss.item())
        self.log("loss", loss)

    def predict_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        return self.model(input_ids=tokens).logits.argmax(-1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(seed: int, rows: int = 32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(list(torch.randint(0, 64, (rows, 8), generator=generator)), batch_size=2)


def trainer(directory: Path, strategy: Any = "auto", **settings: Any) -> Any:
    return lightning.Trainer(
        default_root_dir=directory, accelerator="cpu", strategy=strategy, logger=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        **({"max_steps": 6} | settings),
    )  # fmt: skip


def fit(directory: Path, strategy: Any = "auto", path: Any = None, **settings: Any) -> Any:
    module = Language()
    run = trainer(directory, strategy, **settings)
    run.fit(module, loader(1, 8), loader(2, 8), ckpt_path=path)
    return module, run


def on_castor(**settings: Any) -> CastorStrategy:
    return CastorStrategy(castor.GeminiPlugin(**(BUDGET | settings)))


def test_a_trainer_computes_what_it_did(tmp_path: Path) -> None:
    expected, _ = fit(tmp_path / "plain")
    found, run = fit(tmp_path / "own", on_castor())
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.seen == pytest.approx(expected.seen, rel=1e-5)
    for param, reference in zip(found.parameters(), expected.parameters(), strict=True):
        assert (param - reference).norm() <= 1e-5 * reference.norm()
    report = run.strategy.castor.report()
    assert report.steps == 6
    assert report.peak_device_bytes <= 320 * 1024


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "optim_state_format": "split_int8"},
        {"precision": "fp16"},
    ],
)
def test_a_checkpoint_goes_on_bitwise(settings: dict[str, Any], tmp_path: Path) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(
            tmp_path / "checkpoints", filename="{step}", every_n_train_steps=2, save_top_k=-1
        )

    expected, _ = fit(tmp_path, on_castor(**settings), callbacks=[saver()])
    path = tmp_path / "checkpoints" / "step=4.ckpt"
    assert path.exists()
    found, _ = fit(tmp_path, on_castor(**settings), path, enable_checkpointing=False)
    assert found.losses == expected.losses[-len(found.losses) :]
    assert 0 < len(found.losses) < len(expected.losses)
    assert all(map(torch.equal, found.parameters(), expected.parameters()))


def test_checkpoints_come_and_go_with_their_optimizers(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, save_top_k=1)
    fit(tmp_path, on_castor(), callbacks=[saver], limit_val_batches=0)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 4
    assert sum(name.endswith(".ckpt") for name in files) == 2
    assert "last.ckpt.castor_optimizer.6" in files

    moved = tmp_path / "elsewhere" / "last.ckpt"
    moved.parent.mkdir()
    (tmp_path / "last.ckpt").rename(moved)
    with pytest.raises(castor.UsageError, match=r"castor_optimizer.6, which is not there"):
        fit(tmp_path, on_castor(), moved, max_steps=8)
    with pytest.raises(KeyError):
        fit(tmp_path, "auto", moved, max_steps=8)


def test_a_plain_checkpoint_goes_on_here(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    expected, _ = fit(tmp_path, callbacks=[saver])
    found, _ = fit(tmp_path, on_castor(), tmp_path / "step=4.ckpt", enable_checkpointing=False)
    rest = expected.losses[-len(found.losses) :]
    assert found.losses == pytest.approx(rest, rel=1e-5)


def test_models_are_evaluated_in_a_budget_without_an_optimizer(tmp_path: Path) -> None:
    module = Language()
    expected = trainer(tmp_path).predict(module, loader(4, 8))
    run = trainer(tmp_path, on_castor())
    assert all(map(torch.equal, run.predict(module, loader(4, 8)), expected))
    assert run.strategy.castor.report().peak_device_bytes <= 320 * 1024


def test_what_would_be_done_twice_or_not_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(castor.UsageError, match="gradient_clip_val too: leave max_norm out"):
        on_castor(max_norm=1.0)
    with pytest.raises(castor.UsageError, match="the Trainer has precision='bf16-mixed'"):
        fit(tmp_path, on_castor(precision="bf16"), precision="bf16-mixed")


class Gan(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A generator against a discriminator, each with its optimizer and its schedule."""

    def __init__(self, toggles: bool, clips: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.toggles, self.clips = toggles, clips
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def judged(self, x: torch.Tensor, real: bool) -> torch.Tensor:
        found = self.discriminator(x).float()
        wanted = torch.full_like(found, float(real))
        return nn.functional.binary_cross_entropy_with_logits(found, wanted)

    def training_step(self, x: torch.Tensor, index: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        noise = torch.randn(len(x), 4, generator=torch.Generator().manual_seed(index)).to(x.dtype)
        for optimizer in (of_generator, of_discriminator):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            if optimizer is of_generator:
                loss = self.judged(self.generator(noise), True)
            else:
                made = self.generator(noise).detach()
                loss = (self.judged(x, True) + self.judged(made, False)) / 2
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clips:
                self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        made = [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999)),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]
        return made, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in made]


def fit_gan(
    directory: Path, strategy: Any, toggles: bool, path: Any = None, clips: bool = True, **more: Any
) -> Gan:
    module = Gan(toggles, clips)
    generator = torch.Generator().manual_seed(1)
    rows = DataLoader(list(torch.randn(12, 8, generator=generator)), batch_size=2)  # type: ignore[arg-type]
    run = lightning.Trainer(
        default_root_dir=directory, accelerator="cpu", strategy=strategy, logger=False,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=2,
        **more,
    )  # fmt: skip
    run.fit(module, rows, ckpt_path=path)
    return module


@pytest.mark.parametrize("toggles", [False, True])
def test_several_optimizers_train_a_gan(toggles: bool, tmp_path: Path) -> None:
    expected = fit_gan(tmp_path / "plain", "auto", toggles)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=12, save_top_k=-1)
    found = fit_gan(tmp_path / "own", on_castor(), toggles, callbacks=[saver])
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    for param, reference in zip(found.parameters(), expected.parameters(), strict=True):
        assert (param - reference).norm() <= 1e-4 * reference.norm()
    rest = fit_gan(tmp_path / "rest", on_castor(), toggles, tmp_path / "step=12.ckpt")
    assert rest.losses == found.losses[-len(rest.losses) :]
    assert len(rest.losses) == 12
    assert all(map(torch.equal, rest.parameters(), found.parameters()))
    # Lightning unscales in step, behind what clips by hand.
    unclipped = fit_gan(tmp_path / "unclipped", "auto", toggles, clips=False)
    halves = fit_gan(tmp_path / "half", on_castor(precision="fp16"), toggles, clips=False)
    assert halves.losses == pytest.approx(unclipped.losses, rel=2e-2)


def test_devices_that_nobody_started_are_refused(tmp_path: Path) -> None:
    with pytest.raises(castor.UsageError, match="devices=2 and num_nodes=1, and 1 ranks were"):
        fit(tmp_path, on_castor(), devices=2)
    with pytest.raises(castor.UsageError, match="given find_unused_parameters for Distrib"):
        CastorStrategy(castor.GeminiPlugin(**BUDGET), find_unused_parameters=True)


def test_what_a_trainer_says_of_ranks_is_followed_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    unused = {"find_unused_parameters": True}
    for strategy, options in (
        ("auto", {}), ("ddp", {}), ("ddp_find_unused_parameters_true", unused),
        (DDPStrategy(**unused, process_group_backend="gloo"), unused),
    ):  # fmt: skip
        chosen = _on_castor(BUDGET, {"strategy": strategy, "devices": "auto"})
        assert (chosen["devices"], chosen["num_nodes"]) == (2, 2)
        assert isinstance(chosen["strategy"], DDPStrategy)
        assert isinstance(chosen["strategy"], CastorStrategy)
        assert chosen["strategy"]._ddp_kwargs == options
    assert chosen["strategy"].process_group_backend == "gloo"
    for asked, message in (
        ({"strategy": "fsdp"}, "has strategy='fsdp', and castor run trains"),
        ({"devices": 4}, "has devices=4, and 2 ranks were started on each of 2"),
        ({"num_nodes": 3}, "has num_nodes=3, and 2 ranks"),
    ):
        with pytest.raises(castor.UsageError, match=message):
            _on_castor(BUDGET, asked)
    with pytest.raises(NotImplementedError, match="has ddp_comm_hook or model_averaging"):
        _on_castor(BUDGET, {"strategy": DDPStrategy(ddp_comm_hook=print)})


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "lightning.md"
    block = page.read_text(encoding="utf-8").partition("```py\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(page), "exec"), {"__name__": "guide"})
