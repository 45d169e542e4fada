"""The pieces of examples/train_gpt.py, small; each of the demo's checks is seen to fail."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    import train_gpt
finally:
    sys.path.remove(str(EXAMPLES))

TINY = train_gpt.Settings(
    layers=2,
    width=32,
    heads=2,
    vocab=300,
    positions=32,
    batch=2,
    sequence=16,
    steps=4,
    warmup_steps=2,
    text_bytes=20_000,
)


@pytest.fixture(scope="module")
def batches() -> train_gpt.Batches:
    tokens = train_gpt.tokenise(train_gpt.read_text(TINY.text_bytes), TINY.vocab)
    return train_gpt.Batches(tokens, TINY)


def good_runs() -> tuple[train_gpt.Run, train_gpt.Run]:
    losses = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
    plain = train_gpt.Run(losses=losses)
    castor = train_gpt.Run(losses=list(losses), peak_device_bytes=100, budget_bytes=100)
    return plain, castor


def test_tokens_are_deterministic_and_within_the_vocabulary():
    text = train_gpt.read_text(20_000)
    first, second = (train_gpt.tokenise(text, 300) for _ in range(2))
    assert torch.equal(first, second)
    assert first.min() >= 0
    assert first.max() < 300


def test_batches_depend_on_seed_and_step_only(batches):
    assert torch.equal(batches[3]["input_ids"], batches[3]["input_ids"])
    assert not torch.equal(batches[3]["input_ids"], batches[4]["input_ids"])
    assert batches[0]["input_ids"].shape == (TINY.batch, TINY.sequence)


def test_the_demo_model_has_40_million_parameters_and_a_budget_below_half():
    with torch.device("meta"):
        model = train_gpt.build_model(train_gpt.Settings())
    assert sum(p.numel() for p in model.parameters()) >= 40_000_000
    nonmodel = 216 * 2**20  # as measured; the demo measures it anew and checks the ratio itself
    budget = train_gpt.tight_budget(model, nonmodel, train_gpt.SHARE)
    assert budget < train_gpt.plain_bytes(model, nonmodel) / 2


def test_tight_budget_is_the_formula():
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 10))
    assert train_gpt.param_bytes(model) == 4 * 210
    assert train_gpt.largest_module_bytes(model) == 4 * 110
    assert train_gpt.tight_budget(model, 1000, 0.4) == 1000 + int(2.2 * 440)
    assert train_gpt.tight_budget(model, 1000, 2.0) == 1000 + 2 * 840


def test_castor_trains_like_plain_torch_inside_the_tight_budget(batches):
    nonmodel = train_gpt.train(TINY, batches, device_memory="1GiB").peak_nonmodel_bytes
    budget = train_gpt.tight_budget(train_gpt.build_model(TINY), nonmodel, train_gpt.SHARE)
    plain = train_gpt.train(TINY, batches, device_memory=None)
    castor = train_gpt.train(TINY, batches, device_memory=budget)
    assert castor.losses[0] == plain.losses[0]
    assert max(train_gpt.differences(plain.losses, castor.losses)) < 1e-5
    assert castor.peak_device_bytes <= castor.budget_bytes == budget


def test_kept_promises_pass():
    assert train_gpt.failures(*good_runs()) == []


@pytest.mark.parametrize(
    ("position", "factor", "message"),
    [(0, 1 + 1e-4, "first losses"), (-1, 1 + 1e-2, "last losses"), (-1, math.nan, "last losses")],
)
def test_another_loss_fails_the_demo(position, factor, message):
    plain, castor = good_runs()
    castor.losses[position] *= factor
    assert any(message in line for line in train_gpt.failures(plain, castor))


def test_a_passed_budget_fails_the_demo():
    plain, castor = good_runs()
    over = dataclasses.replace(castor, peak_device_bytes=101)
    assert any("passed the budget" in line for line in train_gpt.failures(plain, over))


def test_a_loss_that_does_not_fall_fails_the_demo():
    flat = train_gpt.Run(losses=[9.0] * 8, peak_device_bytes=1, budget_bytes=2)
    assert any("nats" in line for line in train_gpt.failures(flat, flat))


def test_bad_arguments_are_refused(capsys):
    for arguments in (["--demo", "--precision", "bf16"], ["--device-memory", "much"]):
        with pytest.raises(SystemExit) as error:
            train_gpt.main(arguments)
        assert error.value.code == 2
    assert "write a size" in capsys.readouterr().err
