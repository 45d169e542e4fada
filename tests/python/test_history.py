"""The history of steps: losses as the script knows them, tokens, bytes, bounded memory."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from castor.runtime import history as history_module
from castor.runtime.engine import engine_of
from castor.runtime.history import StepHistory, StepRecord
from helpers import boost, param_bytes
from zoo import CASES, tower, tower_batch

FIGURES = (0, 0, 0)


def records_of(boosted: Any) -> list[StepRecord]:
    return engine_of(boosted.model).history.records


class Recorder(nn.Module):
    """Returns what the test asks for."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, input_ids: torch.Tensor | None = None, **_: Any) -> Any:
        return self.output


def history_of(output: Any, *args: Any, **kwargs: Any) -> StepRecord:
    history, model = StepHistory(), Recorder(output)
    history.watch(model)
    model(*args, **kwargs)
    history.step_ended(FIGURES, skipped=False, learning_rate=0.1, gradient_norm=None)
    return history.records[0]


def test_losses_given_to_booster_backward_are_recorded() -> None:
    boosted = boost(tower())
    losses = [boosted.step(boosted.model(**tower_batch(i))) for i in range(3)]
    assert [record.loss for record in records_of(boosted)] == losses
    assert [record.step for record in records_of(boosted)] == [1, 2, 3]


def test_the_models_own_loss_serves_where_backward_is_plain() -> None:
    boosted = boost(CASES["gpt2"].model())
    batch = CASES["gpt2"].batch(0)
    loss = boosted.model(**batch).loss
    loss.backward()
    boosted.optimizer.step()
    (record,) = records_of(boosted)
    assert record.loss == loss.item()
    assert record.tokens == batch["input_ids"].numel()
    assert record.samples == batch["input_ids"].shape[0]
    assert record.seconds > 0


def test_accumulated_losses_add_up_and_so_do_tokens() -> None:
    boosted = boost(CASES["gpt2"].model())
    given = []
    for i in range(4):
        loss = boosted.model(**CASES["gpt2"].batch(i)).loss / 4
        boosted.booster.backward(loss, boosted.optimizer)
        given.append(loss.item())
    boosted.optimizer.step()
    (record,) = records_of(boosted)
    assert record.loss == pytest.approx(sum(given), rel=1e-12)
    assert record.tokens == 4 * CASES["gpt2"].batch(0)["input_ids"].numel()


def test_bytes_are_those_of_the_step() -> None:
    model = tower()
    size = param_bytes(model)
    boosted = boost(model, gpu_margin_mem_ratio=0.0)
    for i in range(3):
        boosted.step(boosted.model(**tower_batch(i)))
    report = boosted.report()
    records = records_of(boosted)
    assert sum(record.h2d_bytes for record in records) == report.h2d_bytes
    assert sum(record.d2h_bytes for record in records) == report.d2h_bytes == 3 * size
    assert max(record.peak_device_bytes for record in records) == report.peak_device_bytes


def test_skipped_steps_are_marked() -> None:
    boosted = boost(tower())
    boosted.step(boosted.model(**tower_batch(0)))
    with pytest.warns(RuntimeWarning, match="skipped an optimizer step"):
        boosted.step(boosted.model(**tower_batch(1)) * math.inf)
    assert [record.skipped for record in records_of(boosted)] == [False, True]
    assert engine_of(boosted.model).history.totals.skipped_steps == 1


def test_inference_is_no_part_of_a_step() -> None:
    boosted = boost(CASES["gpt2"].model())
    with torch.no_grad():
        boosted.model(**CASES["gpt2"].batch(0))
    boosted.step(boosted.model(**CASES["gpt2"].batch(1)).loss)
    (record,) = records_of(boosted)
    assert record.tokens == CASES["gpt2"].batch(1)["input_ids"].numel()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: SimpleNamespace(loss=loss),
        lambda loss: {"loss": loss, "logits": torch.ones(3)},
        lambda loss: (loss, torch.ones(3)),
    ],
)
def test_the_loss_is_found_in_every_kind_of_output(wrap: Any) -> None:
    assert history_of(wrap(torch.tensor(2.5))).loss == 2.5


@pytest.mark.parametrize(
    "output",
    [
        None,
        torch.ones(3),
        torch.tensor(7),
        (),
        {"logits": torch.ones(2)},
        torch.ones((), device="meta"),
    ],
)
def test_what_is_no_loss_is_not_taken_for_one(output: Any) -> None:
    assert history_of(output).loss is None


def test_positional_token_ids_count() -> None:
    record = history_of(None, torch.zeros(3, 5, dtype=torch.int64))
    assert (record.tokens, record.samples) == (15, 3)


def test_models_without_token_ids_count_samples() -> None:
    record = history_of(None, pixel_values=torch.zeros(4, 3, 8, 8))
    assert (record.tokens, record.samples) == (0, 4)


def test_a_vmapped_forward_is_left_alone() -> None:
    model, history = Recorder(None), StepHistory()
    history.watch(model)

    def call(x: torch.Tensor) -> torch.Tensor:
        model.output = x.sum()
        return model(x)

    assert torch.vmap(call)(torch.ones(3, 2)).tolist() == [2.0, 2.0, 2.0]
    model.output = None


def test_losses_on_a_device_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    history = StepHistory()
    read = []
    monkeypatch.setattr(history_module, "_reading", lambda loss: loss.detach())
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: read.append(tensor.numel()) or tolist(tensor)
    )
    for i in range(history_module._MAX_UNREAD + 3):
        history.loss_given(torch.tensor(float(i)))
        history.step_ended(FIGURES, skipped=False, learning_rate=0.1, gradient_norm=None)
    assert read == [history_module._MAX_UNREAD], "no step waits for the device but one in many"
    assert [record.loss for record in history.records] == list(
        range(history_module._MAX_UNREAD + 3)
    )


def test_memory_is_bounded_and_the_beginning_stays() -> None:
    history = StepHistory()
    steps = 3 * history_module.MAX_RECORDS
    for i in range(steps):
        history.loss_given(torch.tensor(float(i)))
        history.step_ended(FIGURES, skipped=False, learning_rate=0.1, gradient_norm=None)
    records = history.records
    assert len(records) <= history_module.MAX_RECORDS
    assert records[0].step == 1
    recent = [record.step for record in records[-history_module.RECENT_RECORDS :]]
    assert recent == list(range(steps - history_module.RECENT_RECORDS + 1, steps + 1))
    older = [record.step for record in records[: -history_module.RECENT_RECORDS]]
    assert len({b - a for a, b in itertools.pairwise(older[: len(older) // 4])}) == 1, "evenly"
    assert older == sorted(set(older))
    assert history.totals.steps == steps
