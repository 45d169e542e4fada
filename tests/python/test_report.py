"""castor.report: its figures derive from the model, its files are well formed and whole."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castor
from castor.config.event_names import FORWARD_ENTER
from castor.report.html import embedded_json, page, page_data
from castor.report.source import Source, duration, size, source_of
from castor.report.verdict import Verdict, verdict_of
from helpers import (
    Boosted,
    boost,
    largest_module_bytes,
    losses_of_boosted,
    param_bytes,
    tight_memory,
)
from zoo import CASES, tower, tower_batch


def gpt2_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(**CASES["gpt2"].batch(seed)).loss


@pytest.fixture(scope="module")
def tight() -> Boosted:
    """A GPT-2 that streams through a device it does not fit; three steps, two of them by plan."""
    memory = tight_memory(CASES["gpt2"].model, gpt2_loss)
    boosted = boost(CASES["gpt2"].model(), memory, chunk_bytes=8192)
    losses_of_boosted(boosted, gpt2_loss, steps=3)
    return boosted


@pytest.fixture(scope="module")
def source(tight: Boosted) -> Source:
    return source_of(tight.model)


def trained(model: nn.Module, **settings: Any) -> Boosted:
    boosted = boost(model, **settings)
    boosted.step(boosted.model(**tower_batch(0)))
    return boosted


# --- the data -----------------------------------------------------------------------------------


MOMENT_BYTES = {"fp32": 4, "split": 4, "split_bf16": 2}


@pytest.mark.parametrize("state_format", MOMENT_BYTES)
def test_payload_bytes_derive_from_numel(state_format: str) -> None:
    model = tower()
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert all(p.requires_grad for p in model.parameters())
    boosted = trained(model, precision="bf16", optim_state_format=state_format)
    step = source_of(boosted.model).step
    payloads = step.payload_bytes("host")
    slack = 64 * len(list(model.parameters()))  # alignment of each parameter in its chunk
    expected = {"param": 2, "grad": 2}
    expected |= dict.fromkeys(("exp_avg", "exp_avg_sq"), MOMENT_BYTES[state_format])
    expected |= {"master": 4} if state_format == "fp32" else {"remainder": 2}
    assert payloads.keys() == expected.keys()
    for kind, element_size in expected.items():
        assert 0 <= payloads[kind] - element_size * numel <= element_size * slack
    assert step.payload_bytes("device") == {}


def test_payloads_placed_on_the_device_are_told_apart() -> None:
    step = source_of(trained(tower(), placement_policy="cuda").model).step
    assert set(step.payload_bytes("device")) == {"param", "grad", "exp_avg", "exp_avg_sq"}
    assert step.residency() == [[(0, step.end_ns)]] * len(step.chunks)


def test_gradients_leave_as_many_bytes_as_the_parameters_have(
    tight: Boosted, source: Source
) -> None:
    moved = sum(t.bytes for t in source.step.transfers if t.kind == "gradient")
    assert moved == param_bytes(tight.model)


def test_transfers_are_those_that_the_history_counted(source: Source) -> None:
    fetched = sum(t.bytes for t in source.step.transfers if t.kind == "fetch")
    sent = sum(t.bytes for t in source.step.transfers if t.kind != "fetch")
    assert fetched == source.records[-1].h2d_bytes > 0
    assert sent == source.records[-1].d2h_bytes
    assert source.step.guidance == "plan"


def test_transfers_of_every_step_add_up_to_the_report() -> None:
    memory = tight_memory(CASES["gpt2"].model, gpt2_loss)
    boosted = boost(CASES["gpt2"].model(), memory, chunk_bytes=8192)
    found: Counter[str] = Counter()
    for seed in range(3):
        boosted.step(gpt2_loss(boosted.model, seed))
        for transfer in source_of(boosted.model).step.transfers:
            found[f"{transfer.kind} {transfer.cause}"] += 1
    report = boosted.report()
    assert found["fetch demand"] == report.demand_fetches > 0
    evictions = sum(n for name, n in found.items() if name.startswith("eviction"))
    assert evictions - found["eviction step_end"] == report.evictions > 0
    assert found["fetch prefetch"] >= report.prefetch_hits > 0


def test_residency_follows_from_fetches(source: Source) -> None:
    step = source.step
    fetches = Counter(t.chunk for t in step.transfers if t.kind == "fetch")
    for chunk, intervals in enumerate(step.residency()):
        assert len(intervals) == fetches[chunk]
        flat = [time for interval in intervals for time in interval]
        assert flat == sorted(flat)
        assert all(0 <= time <= step.end_ns for time in flat)


def test_the_memory_curve_stays_within_the_budget_and_reaches_the_peak(source: Source) -> None:
    samples = source.step.memory()
    totals = [sample.slot_bytes + sample.nonmodel_bytes for sample in samples]
    assert max(totals) <= source.step.peak_device_bytes <= source.memory.device_budget_bytes
    assert max(totals) >= 0.9 * source.step.peak_device_bytes
    times = [sample.time_ns for sample in samples]
    assert times == sorted(times)
    assert samples[-1].slot_bytes == 0, "a step ends on the host"
    for sample, event in ((samples[0], source.step.events[0]),):
        assert (sample.slot_bytes, sample.host_bytes) == (event.slot_bytes, event.host_bytes)


def test_phases_cover_the_step_in_order(source: Source) -> None:
    phases = source.step.phases()
    assert [phase for phase, _, _ in phases] == ["forward", "backward", "optimizer"]
    assert phases[0][1] == 0
    assert phases[-1][2] == source.step.end_ns
    assert all(a[2] == b[1] for a, b in itertools.pairwise(phases))


def test_accumulation_shows_each_forward_and_backward() -> None:
    boosted = boost(tower())
    for seed in range(2):
        boosted.model(**tower_batch(seed)).backward()
    boosted.optimizer.step()
    phases = [phase for phase, _, _ in source_of(boosted.model).step.phases()]
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]


def test_every_entered_module_has_a_span(source: Source) -> None:
    step = source.step
    enters = Counter(m.id for m in step.events if m.kind == FORWARD_ENTER)
    spans = Counter(span.module for span in step.spans() if span.phase == "forward")
    assert spans == enters
    assert all(span.end_ns >= span.start_ns for span in step.spans())
    open_until: list[int] = []
    for span in step.spans():  # slices of one track nest
        while open_until and open_until[-1] <= span.start_ns:
            open_until.pop()
        assert not open_until or span.end_ns <= open_until[-1]
        open_until.append(span.end_ns)


def test_an_interrupted_forward_does_not_break_the_report(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.fail = nn.Linear(4, 4), nn.Linear(4, 4), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if self.fail:
                raise ValueError("on purpose")
            return self.second(x)

    boosted = boost(Fails())
    with pytest.raises(ValueError, match="on purpose"):
        boosted.model(torch.ones(2, 4))
    boosted.model.fail = False
    boosted.step(boosted.model(torch.ones(2, 4)).square().mean())
    step = source_of(boosted.model).step
    assert all(0 <= span.start_ns <= span.end_ns <= step.end_ns for span in step.spans())
    castor.report.write_html(tmp_path / "report.html", boosted.model)


# --- the trace ----------------------------------------------------------------------------------


def test_the_trace_is_what_perfetto_reads(tight: Boosted, source: Source, tmp_path: Path) -> None:
    path = castor.report.write_trace(tmp_path / "trace.json", tight.booster)
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    threads = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                threads[event["tid"]] = event["args"]["name"]
            continue
        assert 0 <= event["ts"] <= source.step.end_ns / 1000
        if event["ph"] == "X":
            assert event["tid"] in threads
            assert event["dur"] >= 0
            assert event["ts"] + event["dur"] <= source.step.end_ns / 1000 + 1e-6
        else:
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
    slices = [event for event in events if event["ph"] == "X"]
    names = {event["name"] for event in slices if event["cat"] == "backward"}
    assert "transformer.h.0.attn.c_attn" in names
    assert {event["name"] for event in slices if event["cat"] == "optimizer"} == {"optimizer.step"}
    assert sum(event["cat"] == "fetch" for event in slices) == sum(
        t.kind == "fetch" for t in source.step.transfers
    )
    counters = [event["args"] for event in events if event["name"] == "device bytes"]
    assert max(sum(c.values()) for c in counters) <= source.step.peak_device_bytes


# --- the page -----------------------------------------------------------------------------------

HOSTILE = "</script><img src=x onerror=alert(1)>&\u2028\"'\\"


def hostile() -> nn.Module:
    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._modules[HOSTILE] = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._modules[HOSTILE](x).square().mean()

    Hostile.__name__ = "<b>Model</b></title>"
    return Hostile()


def data_of(text: str) -> Any:
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
    )
    return json.loads(data)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    boosted = boost(hostile())
    boosted.step(boosted.model(torch.ones(2, 4)))
    text = castor.report.write_html(tmp_path / "page.html", boosted.model).read_text()
    assert "<img" not in text
    assert "<b>" not in text
    assert text.count("</script>") == 2
    assert text.count("</title>") == 1
    data = data_of(text)
    assert HOSTILE in data["modules"]
    assert data["model"] == "<b>Model</b></title>"
    castor.report.write_trace(tmp_path / "trace.json", boosted.model)


def test_embedded_json_is_json() -> None:
    value = {"a": HOSTILE, "b": [1, None, "<!--"]}
    assert json.loads(embedded_json(value)) == value
    assert "<" not in embedded_json(value)


def test_the_page_loads_nothing(source: Source) -> None:
    text = page(source)
    outside = re.findall(r"""(?:src|href)\s*=|@import|url\(|fetch\(|https?://[^\s"'<]+""", text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert not re.search(r"<!--(title|style|script|data)-->", text)


def test_the_pages_columns_belong_together(source: Source) -> None:
    data = page_data(source)
    for table in ("events", "samples", "transfers"):
        assert len({len(column) for column in data[table].values()}) == 1
    history = data["history"]
    assert len(history["step"]) == len(history["loss"]) == len(history["rate"]) == 3
    assert all(loss is not None for loss in history["loss"])
    assert history["unit"] == "tokens/s"
    owned = sorted(i for chunk in data["chunks"] for i in chunk["params"])
    assert owned == list(range(len(data["params"])))


@pytest.mark.parametrize(
    ("reduced_on", "value", "remark"),
    [
        ("device", "reduced on the devices", f"by communicators of {size(16 << 20)}"),
        ("host: as asked for", "reduced on the host", "as asked for"),
    ],
)
def test_the_page_says_where_ranks_reduce_gradients(
    source: Source, reduced_on: str, value: str, remark: str
) -> None:
    assert "Gradients" not in [name for name, _, _ in source.headline()]
    ranks = {"ranks": 2, "reduced_on": reduced_on, "communicator_bytes": 16 << 20}
    of_two = replace(source, memory=replace(source.memory, **ranks))
    assert ("Gradients", value, remark) in page_data(of_two)["headline"]


def test_losses_that_json_cannot_say_are_gaps(tmp_path: Path) -> None:
    boosted = boost(tower(), nonfinite="ignore")
    boosted.step(boosted.model(**tower_batch(0)) * float("nan"))
    text = castor.report.write_html(tmp_path / "page.html", boosted.model).read_text()
    assert data_of(text)["history"]["loss"] == [None]


# --- the text, and errors -----------------------------------------------------------------------


def judged(source: Source, **memory: Any) -> Verdict:
    return verdict_of(replace(source, memory=replace(source.memory, **memory)))


def test_the_verdict_of_a_run_without_faults_says_what_it_took(source: Source) -> None:
    share = source.memory.peak_device_bytes / source.memory.device_budget_bytes
    text = verdict_of(source).text
    assert size(source.memory.peak_device_bytes) in text
    assert f"({share:.0%})" in text
    assert f"{source.waited_ns() / source.step.end_ns:.1%} of the last step waited" in text


def test_the_verdict_advises_by_what_went_wrong(source: Source) -> None:
    steps = source.memory.steps
    assert "another order than the plan" in judged(source, divergent_steps=steps).advice[0]
    totals = replace(source.totals, skipped_steps=2, steps=4)
    assert "2 of 4 updates were skipped" in verdict_of(replace(source, totals=totals)).advice[0]
    *before, last = source.records
    lost = replace(source, records=[*before, replace(last, loss=float("nan"))])
    assert f"The loss of step {last.step} is nan" in verdict_of(lost).advice[0]
    for bad in (judged(source, divergent_steps=steps), verdict_of(lost)):
        assert not bad.good
        assert bad.text.startswith("Can run better")


def test_the_verdict_tells_of_a_budget_that_stays_free() -> None:
    roomy = boost(tower(), "1GiB")
    for _ in range(3):
        roomy.step(roomy.model(**tower_batch(0)))
    source = source_of(roomy.model)
    # Without transfers: a small step on a busy machine may wait for a tenth of its time.
    verdict = verdict_of(replace(source, step=replace(source.step, transfers=[])))
    assert verdict.good
    (advice,) = verdict.advice
    assert "of the device budget stayed free" in advice


def test_the_page_has_learning_rates_and_norms(tmp_path: Path) -> None:
    boosted = boost(tower(), max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(boosted.optimizer, step_size=1, gamma=0.5)
    norms = []
    for _ in range(3):
        boosted.step(boosted.model(**tower_batch(0)))
        norms.append(boosted.booster.report().gradient_norm)
        scheduler.step()
    history = page_data(source_of(boosted.model))["history"]
    first = history["learningRate"][0]
    assert history["learningRate"] == [first, first / 2, first / 4]
    assert history["gradientNorm"] == norms


def test_the_summary_says_where_the_step_waited() -> None:
    memory = tight_memory(CASES["gpt2"].model, gpt2_loss)
    boosted = boost(CASES["gpt2"].model(), memory, chunk_bytes=8192)
    boosted.step(gpt2_loss(boosted.model, 0))
    text = castor.report.summary(boosted.booster)
    assert text.startswith("GPT2LMHeadModel, step 1: no plan yet")
    assert size(boosted.report().peak_device_bytes) in text
    for word in ("forward", "backward", "optimizer", "waited most", "tokens/s"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    with pytest.raises(ValueError, match="at least 40"):
        castor.report.summary(boosted.booster, width=39)


@pytest.mark.parametrize("name", ["write_html", "write_trace"])
def test_a_report_before_the_first_step_says_what_to_do(name: str, tmp_path: Path) -> None:
    boosted = boost(tower())
    boosted.model(**tower_batch(0)).backward()
    path = tmp_path / "file"
    with pytest.raises(castor.UsageError, match=r"optimizer\.step"):
        getattr(castor.report, name)(path, boosted.model)
    assert not path.exists()
    with pytest.raises(castor.UsageError, match="not boosted"):
        getattr(castor.report, name)(path, tower())
    with pytest.raises(TypeError, match="Booster or a boosted model; it was given a dict"):
        getattr(castor.report, name)(path, {})


def test_a_failed_write_leaves_the_old_file(
    tight: Boosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def refuse(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.rename", refuse)
    with pytest.raises(OSError, match="no space"):
        castor.report.write_html(path, tight.model)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("write", [castor.report.write_html, castor.report.write_trace])
def test_a_folder_that_is_not_there_is_named(tight: Boosted, tmp_path: Path, write: Any) -> None:
    path = tmp_path / "missing" / "file"
    with pytest.raises(castor.IoError, match=f"cannot write {path}: .* create the parent") as error:
        write(path, tight.model)
    assert error.value.filename == str(path)


def test_sizes_and_times_have_fitting_units() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 * 2**20, 12 * 2**30, 2**41)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "12.00 GiB", "2.00 TiB",
    ]  # fmt: skip
    assert [duration(n) for n in (0, 999_000, 1_500_000, 12 * 10**9)] == [
        "0 µs", "999 µs", "1.5 ms", "12.0 s",
    ]  # fmt: skip


def test_a_model_fills_its_largest_module(tight: Boosted, source: Source) -> None:
    slots = max(sample.slot_bytes for sample in source.step.memory())
    assert slots >= largest_module_bytes(tight.model)
