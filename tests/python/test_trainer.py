"""transformers.Trainer over boosted models."""

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import castor
from castor.integrations import transformers as integration
from rank_processes import run, succeeded
from trainer_cases import STEPS, Tokens, arguments, logged, model, on_a_rank, plugin, train, weights


def test_losses_and_norms_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 3, "lr_scheduler_type": "cosine",
        "activation_checkpointing": True,
    }  # fmt: skip
    plain = train(Trainer, tmp_path / "plain", **settings)
    boosted = train(integration.trainer(Trainer, plugin()), tmp_path / "castor", **settings)
    for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert len(logged(boosted, name)) >= 2
        assert logged(boosted, name) == pytest.approx(logged(plain, name), rel=1e-5)
    for mine, theirs in zip(weights(boosted), weights(plain), strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    report = boosted.castor.report(boosted.model)  # type: ignore[attr-defined]
    assert report.steps == STEPS
    assert report.evictions > 0


def test_a_loss_with_parameters_trains_with_the_model(tmp_path: Path) -> None:
    class OwnLoss(Trainer):
        """Its optimizer steps a layer of the loss, which is not of its model."""

        def __init__(self, **keywords: Any) -> None:
            self.layer = torch.nn.Linear(64, 4)
            super().__init__(**keywords)

        def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:
            kind, options = super().get_optimizer_cls_and_kwargs(args, model)
            params = [*self.model.parameters(), *self.layer.parameters()]
            return kind, options | {"optimizer_dict": [{"params": params}]}

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            found = model(**inputs)
            return found.loss + self.layer(found.logits.float()).square().mean()

    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    plain = train(OwnLoss, tmp_path / "plain", **settings)
    boosted = train(integration.trainer(OwnLoss, plugin()), tmp_path / "castor", **settings)
    assert logged(boosted, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    mine, theirs = (run.layer.weight.detach() for run in (boosted, plain))  # type: ignore[attr-defined]
    assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    resumed = integration.trainer(OwnLoss, plugin())
    train(resumed, tmp_path / "castor", resume=tmp_path / "castor" / "checkpoint-5", **settings)


@pytest.mark.parametrize(
    ("precision", "state_format"),
    [
        ("fp32", "fp32"),
        pytest.param("bf16", "fp32", marks=pytest.mark.whole),
        pytest.param("bf16", "split", marks=pytest.mark.whole),
        ("bf16", "split_int8"),
        ("fp16", "fp32"),
    ],
)
def test_a_resume_goes_on_bitwise(precision: str, state_format: str, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, precision: True}
    settings.pop("fp32", None)

    def kind() -> type[Trainer]:
        chosen = plugin(precision=precision, optim_state_format=state_format)
        return integration.trainer(Trainer, chosen)

    whole = train(kind(), tmp_path / "whole", **settings)
    resumed = train(
        kind(), tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoint-3", **settings
    )
    assert all(map(torch.equal, weights(whole), weights(resumed)))
    assert logged(resumed, "loss")[-5:] == logged(whole, "loss")[-5:]
    assert logged(resumed, "grad_norm")[-5:] == logged(whole, "grad_norm")[-5:]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-8", dtype="auto")
    for mine, theirs in zip(read.parameters(), whole.model.parameters(), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_what_a_plain_trainer_saved_goes_on_with_castor(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3}
    whole = train(Trainer, tmp_path / "plain", **settings)
    kind = integration.trainer(Trainer, plugin())
    resumed = train(kind, tmp_path / "castor", resume=tmp_path / "plain" / "checkpoint-3")
    assert logged(resumed, "loss")[-5:] == pytest.approx(logged(whole, "loss")[-5:], rel=1e-5)


def test_what_castor_saved_is_not_taken_for_a_run_without_an_optimizer(tmp_path: Path) -> None:
    kind = integration.trainer(Trainer, plugin())
    train(kind, tmp_path / "castor", save_strategy="steps", save_steps=STEPS)
    with pytest.raises(UnpicklingError):
        train(Trainer, tmp_path / "plain", resume=tmp_path / "castor" / f"checkpoint-{STEPS}")


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    kind = integration.trainer(Trainer, plugin())
    run = train(
        kind, tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    best = Path(str(run.state.best_model_checkpoint))
    assert best.name != f"checkpoint-{STEPS}"
    read = AutoModelForCausalLM.from_pretrained(best)
    assert all(map(torch.equal, read.parameters(), run.model.parameters()))
    losses = logged(run, "eval_loss")
    assert run.evaluate()["eval_loss"] == pytest.approx(max(losses), rel=1e-6)


def test_a_batch_that_the_budget_has_no_room_for_is_halved(tmp_path: Path) -> None:
    kind = integration.trainer(Trainer, plugin(activations="keep"))
    settings = {"per_device_train_batch_size": 4, "auto_find_batch_size": True}
    run = train(kind, tmp_path, **settings)
    assert run._train_batch_size == 2
    assert run.state.global_step == STEPS
    assert torch.tensor(logged(run, "loss")).isfinite().all()
    with pytest.raises(castor.OutOfMemoryError, match="out of device memory"):
        train(kind, tmp_path, per_device_train_batch_size=4)


def test_training_again_goes_on_with_the_same_boosted_model(tmp_path: Path) -> None:
    kind = integration.trainer(Trainer, plugin())
    run = train(kind, tmp_path)
    boosted = run.model
    run.train()
    assert run.model is boosted
    assert len(logged(run, "loss")) == STEPS
    assert run.castor.report(run.model).steps == 2 * STEPS  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trainers_of_one_model_train_in_turn(precision: str, tmp_path: Path) -> None:
    kind = integration.trainer(Trainer, plugin(precision=precision))
    own = model()
    still, learning = (
        kind(model=own, args=arguments(tmp_path, learning_rate=rate), train_dataset=Tokens())
        for rate in (0.0, 1e-2)
    )
    still.train()
    before = weights(still)
    learning.train()
    learnt = weights(still)
    assert not any(map(torch.equal, learnt, before))
    still.train()
    assert all(map(torch.equal, weights(still), learnt))


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_model_that_another_plugin_boosted_is_refused(
    with_optimizer: bool, tmp_path: Path
) -> None:
    def run(loops: castor.GeminiPlugin) -> Trainer:
        own = model()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        castor.Booster(plugin()).boost(own, optimizer)
        return integration.trainer(Trainer, loops)(
            model=own,
            args=arguments(tmp_path, max_steps=1),
            train_dataset=Tokens(),
            optimizers=(optimizer if with_optimizer else None, None),
        )

    run(plugin()).train()  # the same settings
    with pytest.raises(
        castor.UsageError, match=r"chunk_bytes='16KiB', not '32KiB'.*leave boosting"
    ):
        run(plugin(chunk_bytes="32KiB")).train()


def test_callbacks_a_subclass_and_an_optimizer_of_the_users_own(tmp_path: Path) -> None:
    seen: list[float] = []

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append(float(model.lm_head.weight.grad.norm()))

    class Scaled(Trainer):
        def compute_loss(self, *values: Any, **named: Any) -> Any:
            found = super().compute_loss(*values, **named)
            return found * 0.5

    def run(wrap: Callable[[type[Trainer]], type[Trainer]], directory: Path) -> Trainer:
        own = model()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        made = wrap(Scaled)(
            model=own,
            args=arguments(directory),
            train_dataset=Tokens(),
            optimizers=(optimizer, None),
            callbacks=[Norms()],
        )
        made.train()
        return made

    boosted = run(lambda kind: integration.trainer(kind, plugin()), tmp_path / "castor")
    plain = run(lambda kind: kind, tmp_path / "plain")
    assert logged(boosted, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    assert seen[:STEPS] == pytest.approx(seen[STEPS:], rel=1e-4)


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # PEFT's
def test_adapters_train_beside_a_frozen_model(tmp_path: Path) -> None:
    def run(kind: type[Trainer], directory: Path) -> Trainer:
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        own = get_peft_model(model(), config)
        settings = arguments(directory, learning_rate=1e-2, save_strategy="steps", save_steps=STEPS)
        made = kind(model=own, args=settings, train_dataset=Tokens())
        made.train()
        return made

    boosted = run(integration.trainer(Trainer, plugin()), tmp_path / "castor")
    plain = run(Trainer, tmp_path / "plain")
    assert logged(boosted, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    saved = tmp_path / "castor" / f"checkpoint-{STEPS}"
    adapters = load_file(saved / "adapter_model.safetensors")
    expected = load_file(tmp_path / "plain" / saved.name / "adapter_model.safetensors")
    assert adapters.keys() == expected.keys()
    for name, value in adapters.items():
        assert (value - expected[name]).norm() <= 1e-4 * expected[name].norm()


def test_ranks_train_what_one_process_does_with_their_batches(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    succeeded(run(on_a_rank, 2, tmp_path / "ranks"))
    settings = {"eval_strategy": "steps", "eval_steps": 4, "dropout": 0.0}  # 2 micro-batches
    plain = train(Trainer, tmp_path / "plain", **settings)
    for rank in range(2):
        found = torch.load(tmp_path / "ranks" / f"found.{rank}.pt", weights_only=False)
        assert found["ranks"] == 2
        assert found["sent"] == pytest.approx(0.5, rel=0.05)  # 2 micro-batches, one exchange
        assert all(map(torch.equal, found["whole"], found["resumed"]))
        for mine, theirs in zip(found["whole"], weights(plain), strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
        if rank == 0:
            for name in ("loss", "grad_norm", "eval_loss"):
                mine = [entry[name] for entry in found["log"] if name in entry]
                assert mine == pytest.approx(logged(plain, name), rel=1e-5)


def test_what_shards_the_model_a_second_time_is_refused(tmp_path: Path) -> None:
    class Sharded(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.state.distributed_type = DistributedType.FSDP

    kind = integration.trainer(Sharded, plugin())
    with pytest.raises(NotImplementedError, match="distributed_type=FSDP, and castor shards"):
        kind(model=model(), args=arguments(tmp_path), train_dataset=Tokens())


def test_one_process_trains_on_one_of_several_gpus(tmp_path: Path) -> None:
    chosen = arguments(tmp_path)
    chosen._n_gpu = 2  # as on a machine with two
    kind = integration.trainer(Trainer, plugin())
    with pytest.warns(RuntimeWarning, match="sees 2 GPUs.*batches are of 2.*--nproc 2") as caught:
        run = kind(model=model(), args=chosen, train_dataset=Tokens())
    assert caught[0].filename == __file__
    run.train()
    assert run.model_wrapped is run.model
    assert run.args.train_batch_size == 2
    assert chosen.n_gpu == 2


def test_the_users_arguments_stay_as_they_are(tmp_path: Path) -> None:
    given = arguments(tmp_path, bf16=True)
    kind = integration.trainer(Trainer, plugin(precision="bf16"))
    run = kind(model=model(), args=given, train_dataset=Tokens())
    assert given.bf16
    assert not run.accelerator.native_amp
    run.train()
    assert run.model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_norm": 1.0}, castor.UsageError, "max_norm=1.0, and a Trainer clips by its own"),
        (
            {"overlap": "backward", "nonfinite": "ignore", "enable_gradient_accumulation": False},
            castor.UsageError,
            "overlap='backward' updates parameters before",
        ),
    ],
)
def test_what_plugin_and_trainer_would_both_do_is_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        integration.trainer(Trainer, plugin(**settings))


def test_a_precision_that_the_plugin_does_not_have_is_refused(tmp_path: Path) -> None:
    kind = integration.trainer(Trainer, plugin())
    with pytest.raises(castor.UsageError, match=r"bf16=True and GeminiPlugin precision='fp32'"):
        kind(model=model(), args=arguments(tmp_path, bf16=True), train_dataset=Tokens())


def test_another_trainer_than_is_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Trainer, "_prepare_for_training")
    with pytest.raises(ImportError, match="Trainer without _prepare_for_training: castor"):
        integration.trainer(Trainer, plugin())
    with pytest.raises(castor.UsageError, match="not a class of transformers"):
        integration.trainer(int, plugin())  # type: ignore[type-var]


def test_a_trainer_that_trains_with_castor_already_is_refused() -> None:
    kind = integration.trainer(Trainer, plugin())
    with pytest.raises(castor.UsageError, match="Trainer trains with castor already"):
        integration.trainer(kind, plugin())
