"""castor estimate: figures from a config alone, and refusals of what cannot be estimated."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from castor import _C
from castor.activations.block_profile import Link, spans_of
from castor.config.event_names import BACKWARD_ENTER, FORWARD_ENTER, GRAD_READY
from castor.estimate import Estimate, Estimator, Workload, estimate, machine, preset_names
from castor.estimate.machine import _data, parse_flops
from castor.estimate.search import largest
from castor.estimate.simulator import options
from estimating import GPT_18B, OPTIONS, SMALL, small_machine, train, write
from rank_processes import run_python

KEYS = {
    "fits",
    "device_bytes",
    "host_bytes",
    "nvme_bytes",
    "nvme_weight_bytes",
    "step_time_s",
    "bound",
    "tokens_per_s",
    "device_update_fraction",
    "max_batch",
    "max_sequence",
    "nonmodel_bytes",
    "blocks",
    "recomputed_blocks",
    "offloaded_blocks",
    "rows_per_tile",
    "fits_with",
}
NCCL = ("--transport", "nccl")
RTX3090 = ("--preset", "rtx3090")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_python("-W", "error", "-m", "castor", "estimate", *arguments)


@pytest.fixture(autouse=True)
def _no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been asked before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Estimator:
    return Estimator(write(tmp_path_factory.mktemp("small"), SMALL), Workload(sequence=64))


# --- the command --------------------------------------------------------------------------------


def test_json_has_the_keys_and_plain_values(tmp_path: Path) -> None:
    done = run(write(tmp_path, SMALL), *RTX3090, "--seq", "64", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures) == KEYS
    assert figures["fits"] is True
    assert figures["nvme_bytes"] == 0
    assert figures["bound"] in {"compute", "h2d", "d2h", "dram"}
    assert figures["tokens_per_s"] == pytest.approx(64 / figures["step_time_s"])
    assert figures["max_batch"] >= 1
    assert figures["max_sequence"] == 64, "the config's n_positions"


def test_table_says_what_would_make_it_fit(tmp_path: Path) -> None:
    config = write(tmp_path, SMALL)
    done = run(config, *RTX3090, "--seq", "64", "--host-memory", "3MiB", "--format", "fp32")
    assert done.returncode == 1, done.stderr
    assert "to make it fit" in done.stdout
    assert "more memory, or --nvme, or --format split_bf16 or split_int8" in done.stdout
    assert "3.6 MiB of 3.0 MiB" in done.stdout


def test_table_prints_what_was_decided(tmp_path: Path) -> None:
    options = ("--seq", "64", "--batch", "8", "--device-memory", "5MiB")  # so: auto
    done = run(write(tmp_path, SMALL), *RTX3090, *options)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    found = re.search(r"beside chunks; (\d) of 4 blocks are recomputed(?:, (\d) offloaded)?", shown)
    assert found, done.stdout
    assert int(found[1]) + int(found[2] or 0) > 0
    assert re.search(r"largest batch \d+ longest sequence 64 tokens, at batch 8", shown)


def test_a_device_that_is_too_small_is_told_what_would_fit(tmp_path: Path) -> None:
    workload = Workload(batch=64, sequence=64, activations="auto")
    estimator = Estimator(write(tmp_path, SMALL), workload)
    found = estimator.estimate(small_machine(device_memory="3MiB"))
    assert not found.fits
    (said,) = found.remedies
    assert re.match(
        r"(block 'transformer\.h\.\d' \(module '\S+'\)|module '\S+') needs \S+ MiB of device "
        r"memory, \S+ MiB more than there is: "
        rf"at most {found.max_batch} x 64 or 64 x {found.max_sequence} "
        r"tokens instead of 64 x 64, or a device with that much$",
        said,
    ), said
    assert found.max_batch > 0
    none = estimator.estimate(small_machine(device_memory="64KiB"))
    assert "no smaller batch fits, or a device with that much" in none.remedies[0]


def cpu_seconds_and_peak_bytes(
    *arguments: str, imported: str, script: Path | None = None
) -> tuple[float, float, float]:
    """Of the imports of `imported`, of the command that fits from there on, and of memory.

    With a path for a script, of a process that has imported it all beforehand.

    CPU time, in which other work on the machine counts only as far as it shares a core. Memory by
    VmHWM: ru_maxrss remembers what the process that started this one had.
    """
    code = (
        "import pathlib, re, sys, time\n"
        f"import {imported}\n"
        "imported = time.process_time()\n"
        "from castor.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "seconds = time.process_time() - imported\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(imported, seconds, int(re.search(r'VmHWM:\\s*(\\d+) kB', status)[1]) * 1024)\n"
    )
    options = ("estimate", *arguments, "--json")
    if script is not None:
        script.write_text(code)
        done = run_python("-W", "error", script, *options)
    else:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, *options],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert json.loads("".join(lines))["fits"]
    imports, seconds, peak_bytes = map(float, last.split())
    return imports, seconds, peak_bytes


@pytest.mark.slow
def test_18b_gpt_takes_less_than_ten_seconds_and_two_gib(tmp_path: Path) -> None:
    # Without the imports of torch and transformers: more than half of the whole, and not castor's.
    modules = "transformers.models.gpt2.modeling_gpt2"
    config = str(write(tmp_path, GPT_18B))
    _, seconds, peak_bytes = cpu_seconds_and_peak_bytes(
        config, *RTX3090, imported=modules, script=tmp_path / "script.py"
    )
    assert seconds < 10
    assert peak_bytes < 2 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 4096), pytest.param((1, 32768), marks=pytest.mark.whole)])
def test_an_8b_llama_takes_less_than_ten_seconds_with_imports(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    """Where importing torch and transformers takes three; on a slower machine in proportion."""
    batch, sequence = map(str, shape)
    options = ("--preset", "rtx4090", "--activations", "auto", "--batch", batch, "--seq", sequence)
    config, modules = str(write(tmp_path, LLAMA_8B)), "transformers.models.llama.modeling_llama"
    imports, seconds, _ = cpu_seconds_and_peak_bytes(config, *options, imported=modules)
    assert imports + seconds < 10 * max(1, imports / 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "rtx9999"], "unknown preset 'rtx9999'; choose one of rtx3090"),
        ([], "the machine lacks device memory, host memory, h2d, dram, flops"),
        ([*RTX3090, "--device-memory", "much"], "device_memory is 'much'"),
        ([*RTX3090, "--h2d", "25"], "h2d is '25'; write a bandwidth"),
        ([*RTX3090, "--flops", "fast"], "flops is 'fast'"),
        ([*RTX3090, "--flops", "0"], "must be above 0"),
        ([*RTX3090, "--batch", "0"], "batch is 0"),
        ([*RTX3090, "--seq", "128"], "is 64; give at most that"),
        ([*RTX3090, "--format", "int4"], "state_format is 'int4'"),
        ([*RTX3090, "--precision", "fp8"], "precision is 'fp8'"),
        ([*RTX3090, "--precision", "fp32", "--format", "split"], "is for bf16 parameters"),
        ([*RTX3090, "--overlap", "backward"], "overlap is 'backward'"),
    ],
)
def test_nonsense_arguments_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    assert_refused([str(write(tmp_path, SMALL)), *arguments], said, monkeypatch, capsys)


def assert_refused(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from castor import cli

    monkeypatch.setattr(sys, "argv", ["castor", "estimate", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "has no 'model_type'"),
        ({"n_embd": 64}, "has no 'model_type'"),
        ({"model_type": "no_such_model"}, "cannot build this model"),
        (SMALL | {"architectures": ["NoSuchModel"]}, "no architecture 'NoSuchModel'"),
        (SMALL | {"n_embd": 63}, "cannot build this model"),
        (SMALL | {"n_layer": "many"}, "cannot build this model"),
        (SMALL | {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised model"),
        (SMALL | {"architectures": ["GPT2Model"]}, "returns no loss"),
    ],
)
def test_nonsense_configs_are_refused(tmp_path: Path, config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        estimate(write(tmp_path, config), machine("h100"), Workload(sequence=64))


def test_a_config_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        estimate(tmp_path / "config.json", machine("h100"))


# --- the figures --------------------------------------------------------------------------------


def test_no_weights_are_allocated(small: Estimator) -> None:
    assert {param.device.type for param in small._model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in small._model.buffers()} <= {"meta"}


@pytest.mark.parametrize(
    ("state_format", "bytes_per_param"),
    [("fp32", 16), ("split", 14), ("split_bf16", 10), ("split_int8", 8 + 1 / 32)],
)
def test_host_bytes_are_those_of_the_state_format(
    tmp_path: Path, state_format: Any, bytes_per_param: float
) -> None:
    workload = Workload(sequence=64, state_format=state_format)
    found = estimate(write(tmp_path, SMALL), small_machine(), workload)
    # Chunks align parameters to 64 bytes, for split_int8 to blocks of 256 elements.
    gaps = 0.03 if state_format == "split_int8" else 0.01
    assert found.host_bytes == pytest.approx(found.parameters * bytes_per_param, rel=gaps)


@pytest.mark.parametrize("figure", ["h2d", "d2h", "dram", "flops", "device_bandwidth"])
def test_a_faster_machine_is_never_slower(small: Estimator, figure: str) -> None:
    slow = small_machine(device_bandwidth="1GB/s")
    fast = dataclasses.replace(slow, **{figure: getattr(slow, figure) * 4})
    before, after = small.estimate(slow), small.estimate(fast)
    assert after.step_time_s <= before.step_time_s  # type: ignore[operator]
    assert after.device_bytes == before.device_bytes


def test_operators_take_time_of_their_own(small: Estimator) -> None:
    of_all = [
        small.estimate(small_machine(operator_us=us)).busy_s["compute"] for us in (None, 10, 20)
    ]
    assert of_all[1] > of_all[0]
    assert of_all[2] - of_all[1] == pytest.approx(of_all[1] - of_all[0])
    for wrong in (0, -1.0, "10us", True):
        with pytest.raises(ValueError, match=r"operator_us is .*; give microseconds, above 0"):
            small_machine(operator_us=wrong)


def test_more_memory_takes_larger_batches_and_moves_less(small: Estimator) -> None:
    figures = [
        small.estimate(small_machine(device_memory=f"{mib}MiB")) for mib in (2, 4, 8, 16, 32)
    ]
    batches = [found.max_batch for found in figures]
    assert batches == sorted(batches)
    assert batches[-1] > batches[0] >= 1
    h2d = [found.busy_s["h2d"] for found in figures]
    assert h2d == sorted(h2d, reverse=True)


def test_the_largest_batch_is_the_last_one_that_fits(tmp_path: Path) -> None:
    on = small_machine()
    config = write(tmp_path, SMALL)
    largest = estimate(config, on, Workload(sequence=64)).max_batch
    assert estimate(config, on, Workload(sequence=64, batch=largest)).fits
    above = estimate(config, on, Workload(sequence=64, batch=largest + 1))
    assert not above.fits
    assert above.max_batch == largest
    assert above.step_time_s is above.bound is above.tokens_per_s is None
    assert "--activations auto" in above.remedies[0]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_the_longest_sequence_is_the_last_one_that_fits(tmp_path: Path, activations: Any) -> None:
    on = small_machine()
    config = write(tmp_path, SMALL | {"n_positions": 4096})

    def of(sequence: int) -> Estimate:
        workload = Workload(batch=2, sequence=sequence, activations=activations)
        return estimate(config, on, workload)

    longest = of(64).max_sequence
    assert longest is not None
    assert 64 < longest < 4096
    assert of(longest).fits
    above = of(longest + 1)
    assert not above.fits
    assert above.max_sequence == longest


def test_no_sequence_fits_where_parameters_do_not(tmp_path: Path) -> None:
    config = write(tmp_path, SMALL)
    found = estimate(config, small_machine(host_memory="3MiB"), Workload(sequence=64))
    assert found.max_sequence == found.max_batch == 0


def test_offloaded_activations_that_the_host_has_no_room_for_make_the_largest_batch_smaller(
    tmp_path: Path,
) -> None:
    workload = Workload(batch=64, sequence=64, activations="offload")
    config, on = write(tmp_path, SMALL), small_machine(device_memory="256MiB", host_memory="8MiB")
    found = estimate(config, on, workload)
    assert found.host_bytes > on.host_bytes
    largest = found.max_batch
    assert 0 < largest < 64
    fitting = dataclasses.replace(workload, batch=largest)
    assert estimate(config, on, fitting).fits


def test_images_have_no_longest_sequence(tmp_path: Path) -> None:
    vit = {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 48,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 16, "patch_size": 4, "num_labels": 10,
    }  # fmt: skip
    found = estimate(write(tmp_path, vit), small_machine())
    assert found.max_batch > 0
    assert found.max_sequence is None


@pytest.mark.parametrize("power", [1.0, 1.3])
def test_search_for_the_largest_batch_ends_soon_and_is_right(power: float) -> None:
    asked = []

    def needed(batch: int) -> int:
        asked.append(batch)
        return int(1000 + 70 * batch**power)

    budgets, starts, fixed = (500, 1069, 1070, 1071, 5000, 123456, 10**9), (1, 3, 64), (1000, 1300)
    for budget, start, zero in itertools.product(budgets, starts, fixed):
        asked.clear()
        found = largest(needed, budget, fixed=zero, start=start, most=2**20)
        assert len(asked) <= (4 if power == 1 else 10)
        assert found == 0 or needed(found) <= budget
        assert found == 2**20 or needed(found + 1) > budget
        at_least = largest(needed, budget, fixed=zero, start=start, most=2**20, least=3)
        assert at_least == (found if found >= 3 else 0)


def test_checkpointing_recomputes_and_takes_less_memory(tmp_path: Path) -> None:
    config = write(tmp_path, SMALL)
    plain = Estimator(config, Workload(sequence=64)).step(4)
    saved = Estimator(config, Workload(sequence=64, activations="recompute")).step(4)
    peaks = [max(m.nonmodel_bytes for m in step.trace) for step in (plain, saved)]
    assert peaks[1] < peaks[0]
    assert saved.flops > plain.flops
    enters = [sum(m.kind == FORWARD_ENTER for m in step.trace) for step in (plain, saved)]
    assert enters[1] > enters[0]


LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize(("batch", "sequence", "gib"), [(4, 4096, 9), (1, 32768, 17)])
def test_an_8b_llama_fits_a_card_of_24_gib(
    batch: int, sequence: int, gib: int, tmp_path: Path
) -> None:
    workload = Workload(batch=batch, sequence=sequence, activations="recompute")
    card = machine("rtx4090")
    estimator = Estimator(write(tmp_path, LLAMA_8B), workload)
    step = estimator.step(batch)
    found = estimator.simulate(step, card)
    assert found["smallest_budget_bytes"] <= card.device_bytes
    assert found["nonmodel_bytes"] <= gib * 2**30
    assert found["recomputed_blocks"] == 32
    estimator.workload = dataclasses.replace(workload, activations="auto")
    decided = estimator.simulate(step, card)
    assert decided["smallest_budget_bytes"] <= card.device_bytes
    assert decided["step_seconds"] <= found["step_seconds"]
    assert decided["recomputed_blocks"] + decided["offloaded_blocks"] <= 32
    assert decided["host_bytes"] <= card.host_bytes


def test_decisions_are_the_fastest_of_all_that_fit(tmp_path: Path) -> None:
    config = write(tmp_path, SMALL)
    workload = Workload(sequence=64, activations="auto")
    estimator = Estimator(config, workload)
    step = estimator.step(8)
    margin = max(run.input_bytes for run in step.runs)
    events = [(m.kind, m.position, m.nonmodel_bytes, 0) for m in step.trace]
    counts = []
    for memory in ("3MiB", "5MiB", "8MiB", "12MiB", "64MiB"):
        on = small_machine(device_memory=memory, flops="100G")
        decided = estimator.simulate(step, on)
        counts.append(decided["recomputed_blocks"] + decided["offloaded_blocks"])
        seconds = [sum(flops / on.flops for flops, _ in m.work) for m in step.trace]
        times = []
        for decisions in itertools.product(("keep", "recompute", "offload"), repeat=4):
            spans = spans_of(step.runs, decisions, Link(min(on.h2d, on.d2h), True), seconds)
            figures = estimator._simulator.run(
                *_C.keep_activations(events, spans.seconds, spans.spans),
                options(on, overlap=estimator.workload.overlap),
            )
            recomputed = set(decisions) == {"recompute"}
            needed = figures["smallest_budget_bytes"] + (0 if recomputed else margin)
            if needed <= on.device_bytes or recomputed:
                times.append(figures["step_seconds"])
        assert decided["step_seconds"] <= 1.001 * min(times)
    assert counts[0] > 0 == counts[-1]


def test_the_step_of_recomputed_blocks_is_that_of_a_real_one(tmp_path: Path) -> None:
    workload = Workload(sequence=64, precision="fp32", state_format="fp32", activations="recompute")
    step = Estimator(write(tmp_path, SMALL), workload).step(2)
    real = train("64MiB", activations="recompute").trace()
    assert [(m.kind, m.position) for m in step.trace] == [event[:2] for event in real]


def test_tiles_of_logits_are_predicted(tmp_path: Path) -> None:
    config = SMALL | {"vocab_size": 60_000, "n_embd": 32, "n_layer": 1}
    workload = Workload(sequence=64, precision="fp32", state_format="fp32")
    estimator = Estimator(write(tmp_path, config), workload)
    step = estimator.step(8)
    on = small_machine(device_memory="128MiB")
    whole = max(event.nonmodel_bytes for event in step.trace)
    found = estimator.simulate(step, on)
    assert found["rows_per_tile"] == 69  # 16 MiB
    real = train("128MiB", model=config, batch=8).report()["peak_nonmodel_bytes"]
    assert abs(found["nonmodel_bytes"] - real) <= 0.1 * real < 0.1 * whole / 4


def test_flops_are_six_for_each_weight_and_token_and_those_of_attention(small: Estimator) -> None:
    step = small.step(2)
    tokens, width, layers = 2 * 64, SMALL["n_embd"], SMALL["n_layer"]
    weights = 12 * layers * width**2 + SMALL["vocab_size"] * width  # type: ignore[operator]
    # Two products of 2 * 64 * width FLOPs a token in forward, five in backward.
    attention = 7 * 2 * 64 * width * layers * tokens  # type: ignore[operator]
    assert step.flops == 6 * weights * tokens + attention


@pytest.mark.parametrize("gather", [False, True])
def test_meta_step_has_the_events_of_a_real_one(gather: bool, tmp_path: Path) -> None:
    workload = Workload(
        sequence=64, precision="fp32", state_format="fp32", gather_embeddings=gather
    )
    estimator = Estimator(write(tmp_path, SMALL), workload)
    recorded = estimator.step(2).trace
    real = train("64MiB", gather_embeddings=gather).trace()
    assert [(m.kind, m.position) for m in recorded] == [e[:2] for e in real]
    ready = [m.position for m in recorded if m.kind == GRAD_READY]
    assert sorted(ready) == list(range(len(ready))), "each chunk's once"
    assert BACKWARD_ENTER in {m.kind for m in recorded}


@pytest.mark.parametrize("gather", [False, True])
def test_peaks_and_traffic_of_real_steps_are_predicted_to_the_byte(
    gather: bool, tmp_path: Path
) -> None:
    workload = Workload(
        sequence=64, precision="fp32", state_format="fp32", gather_embeddings=gather
    )
    simulator = Estimator(write(tmp_path, SMALL), workload)._simulator
    reference = train("64MiB", gather_embeddings=gather)
    moments = reference.timeline()["events"]
    nonmodel = reference.report()["peak_nonmodel_bytes"]
    param_bytes = sum(chunk["used_bytes"] for chunk in reference.chunks())
    largest = max(chunk["capacity_bytes"] for chunk in reference.chunks())
    resident = []
    for share in (0.2, 0.35, 0.5, 0.8, 1.2, 2.5, 6.0):
        budget = nonmodel + max(int(share * param_bytes), 2 * largest)
        real = train(budget, gather_embeddings=gather)
        timeline = real.timeline()
        step = simulator.run(
            events=[(m[0], m[1], m[4], m[2]) for m in moments],
            compute_seconds=[0.0] * len(moments),
            options=OPTIONS
            | {"device_bytes": budget, "gradient_copies": "synchronous", "margin_ratio": 1.0},
        )
        resident.append(step["num_resident"])
        assert step["num_resident"] == real.report()["resident_chunks"]
        fetched = sum(t[7] for t in timeline["transfers"] if t[0] == "fetch")
        assert step["peak_device_bytes"] == timeline["peak_device_bytes"]
        assert step["h2d_bytes"] == fetched
        assert step["host_bytes"] == real.report()["host_bytes"]
    assert resident[0] == 0
    assert resident == sorted(resident)
    apart = 1 if gather else 0  # that of the positions; the words' weight is the head's too
    assert resident[-1] == len(reference.chunks()) - apart


def test_shards_of_gradients_that_devices_reduce_go_to_the_host(
    tmp_path: Path,
) -> None:
    """And the device keeps three buffers for them, as large as the largest chunk."""
    workload = Workload(sequence=64, precision="fp32", state_format="fp32")
    estimator = Estimator(write(tmp_path, SMALL), workload)
    trace = estimator.step(2).trace
    of_one, of_four = (
        estimator._simulator.run(
            events=[(m.kind, m.position, m.nonmodel_bytes, 0) for m in trace],
            compute_seconds=[0.0] * len(trace),
            options=OPTIONS | {"device_bytes": 64 << 20, "policy": "cpu", "gathering_ranks": ranks},
        )
        for ranks in (1, 4)
    )
    assert of_one["d2h_bytes"] == 4 * of_four["d2h_bytes"] > 0
    assert of_one["h2d_bytes"] == of_four["h2d_bytes"]
    buffers = of_four["smallest_budget_bytes"] - of_one["smallest_budget_bytes"]
    chunks = train("64MiB").chunks()
    assert buffers == min(3, len(chunks)) * max(chunk["used_bytes"] for chunk in chunks)


# --- machines -----------------------------------------------------------------------------------


def test_presets_are_there_with_their_sources() -> None:
    assert set(preset_names()) == {
        "rtx3090",
        "rtx4090",
        "rtx5090",
        "rtx6000ada",
        "a100",
        "h100",
        "h200",
    }
    data = _data()
    for group in ("links", "hosts", "presets"):
        assert all(entry["source"] for entry in data[group].values())
    assert all(entry["assumption"] for entry in data["sustained"].values())
    for name in preset_names():
        assert machine(name, precision="fp32").flops < machine(name).flops


def test_figures_replace_those_of_a_preset() -> None:
    base = machine("a100")
    changed = machine("a100", device_memory="40GiB", h2d="10GB/s")
    assert (changed.device_bytes, changed.h2d) == (40 * 2**30, 10e9)
    assert (changed.d2h, changed.dram, changed.flops) == (base.d2h, base.dram, base.flops)


def test_without_a_preset_the_way_back_is_as_fast_as_the_way_there() -> None:
    assert small_machine().d2h == small_machine().h2d == 1e9
    assert small_machine(d2h="2GB/s").d2h == 2e9


@pytest.mark.parametrize(
    ("text", "rate"), [("70T", 70e12), ("70 TFLOP/s", 70e12), ("1.5P", 1.5e15), ("900g", 9e11)]
)
def test_rates_of_computing_are_read(text: str, rate: float) -> None:
    assert parse_flops(text, "flops") == rate


# --- the binding --------------------------------------------------------------------------------


def test_simulator_refuses_an_unknown_mode() -> None:
    spec = [("w", 16, True)], [("model", [0], -1)], "float32", 0
    simulator = _C.Simulator(*spec, "fp32")
    step = simulator.run([(0, 0, 0, 0), (1, 0, 0, 0)], [1.0, 0.0], OPTIONS)
    # The copy of 64 bytes, a second of computing, and 28 bytes an element of Adam.
    assert step["step_seconds"] == 64 + 1 + 28 * 16
    resident = simulator.run(
        [(0, 0, 0, 0), (1, 0, 0, 0), (3, 0, 0, 0)],
        [1.0, 0.0, 0.0],
        OPTIONS | {"margin_ratio": 1.0, "device_memory_bytes_per_second": 7.0},
    )
    assert resident["num_resident"] == 1
    assert resident["step_seconds"] == 1 + 28 * 16 / 7, "nothing is copied"
    assert resident["h2d_bytes"] == resident["d2h_bytes"] == 0
    assert resident["peak_device_bytes"] == 64 + 16 * 16, "beside the window of a gradient"
    assert resident["host_bytes"] == step["host_bytes"]
    for key in ("parameter_copies", "update_cores", "overlap"):
        with pytest.raises(ValueError, match="nonsense"):
            simulator.run([], [], OPTIONS | {key: "nonsense"})
    with pytest.raises(ValueError, match="nonsense"):
        _C.Simulator(*spec, "nonsense")
    with pytest.raises(ValueError, match="for bfloat16 parameters"):
        _C.Simulator(*spec, "split")


# --- several ranks ------------------------------------------------------------------------------


def of_ranks(tmp_path: Path, *arguments: str) -> Any:
    done = run(write(tmp_path, SMALL), *RTX3090, "--seq", "64", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_copies_on_ranks_exchange_gradients_and_weights(tmp_path: Path, small: Estimator) -> None:
    """As castor plan has copies of the model; GPUs of two machines send 3 (n - 1) / n of it."""
    parameters = 2 * small.num_parameters
    ranks = ("--nproc", "2", *NCCL, "--link", "200GB/s", "--dram", "80GB/s", "--batch", "2")
    two = of_ranks(tmp_path, *ranks, "--reduce-on", "host")
    assert two["fits"]
    assert two["node_bytes"] == pytest.approx(1 / 2 * parameters)
    assert two["network_bytes"] == 0
    # Through memory of the host: a rank's half of it, written and read.
    assert two["busy_s"]["reduce"] == pytest.approx(two["node_bytes"] / 20e9)
    assert two["tokens_per_s"] == pytest.approx(2 * 2 * 64 / two["step_time_s"])
    assert two["exposed_s"] == two["busy_s"]["reduce"]
    assert two["exposed_share"] == two["exposed_s"] / two["step_time_s"]
    summed = of_ranks(tmp_path, *ranks, "--reduction", "backend")
    assert summed["exposed_share"] < two["exposed_share"]
    on_gpus = of_ranks(tmp_path, *ranks)
    assert (two["reduced_on"], on_gpus["reduced_on"]) == ("host", "device")
    assert on_gpus | {"reduction": "backend"} == summed
    eight = ("--nproc", "4", "--nodes", "2", *NCCL, "--link", "20GB/s", "--network")
    bits, slow = (of_ranks(tmp_path, *eight, speed) for speed in ("80Gb/s", "1GB/s"))
    assert bits["network_bytes"] == pytest.approx(3 * 7 / 8 * parameters, abs=1)
    assert bits["busy_s"]["reduce"] == pytest.approx(bits["network_bytes"] / 10e9, rel=1e-6)
    assert slow["busy_s"]["reduce"] == pytest.approx(10 * bits["busy_s"]["reduce"])
    assert slow["step_time_s"] > bits["step_time_s"]
    # States are in shards on all ranks; weights and gradients are there once a machine, or a rank.
    assert two["host_bytes"] == pytest.approx((4 + 10) / 2 * small.num_parameters, rel=0.08)
    assert bits["host_bytes"] == pytest.approx((4 + 10 / 8) * small.num_parameters, rel=0.08)


def test_copies_on_ranks_are_shown(tmp_path: Path) -> None:
    config = write(tmp_path, SMALL)
    done = run(config, *RTX3090, "--seq", "64", "--nproc", "2", *NCCL, "--link", "20GB/s")
    assert done.returncode == 0, done.stderr
    assert "1 x 2 ranks, each 1 x 64 tokens" in done.stdout
    assert re.search(r"sent in a step +[\d.]+ MiB a rank within a node, 0.0 MiB to", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--nproc", "2", *NCCL), "link is missing: the bandwidth of a rank"),
        (("--nproc", "2", "--link", "20GB/s"), "or give transport: nccl"),
        (NCCL, "--transport is between ranks: give --nproc or --nodes as well"),
        (("--nodes", "2"), "network is missing"),
        (("--link", "20GB/s"), "--link is between ranks: give --nproc or --nodes as well"),
        (("--nproc", "2", *NCCL, "--link", "20gb/s"), "or '400Gb/s' for bits"),
        (("--nproc", "2", *NCCL, "--link", "20GB/s", "--activations", "auto"),
         "--activations auto is not predicted of several ranks: keep or recompute is"),
        (("--nproc", "2", *NCCL, "--link", "20GB/s", "--gather-embeddings"),
         "--gather-embeddings True"),
        (("--nproc", "2", *NCCL, "--link", "20GB/s", "--max-prefetch", "2"),
         "--max-prefetch 2 is not"),
    ],
)  # fmt: skip
def test_what_several_ranks_are_not_predicted_with_is_named(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused([str(write(tmp_path, SMALL)), *RTX3090, *arguments], says, monkeypatch, capsys)
