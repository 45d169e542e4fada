"""castor io-bench: what it measures, what it makes of it, and that it leaves nothing behind."""

import errno
import json
from pathlib import Path

import pytest
from rich.console import Console

import castor
from castor import _C, cli, io_bench
from castor.io_bench import IoReport, Measurement

ENGINES = [
    pytest.param(
        "io_uring",
        marks=pytest.mark.skipif(bool(_C.why_no_io_uring()), reason=_C.why_no_io_uring()),
    ),
    "threads",
    "auto",
]


def measurement(
    mix: io_bench.Mix, rate: float, block_bytes: int = 2**20, depth: int = 4
) -> Measurement:
    reads = {"read": 1.0, "write": 0.0, "mixed": 0.5}[mix]
    return Measurement(
        mix=mix,
        block_bytes=block_bytes,
        depth=depth,
        read_bytes_per_second=rate * reads,
        write_bytes_per_second=rate * (1 - reads),
        engine="made up",
    )


def report(*measurements: Measurement) -> IoReport:
    return IoReport(file="file", direct=True, why_no_io_uring="", measurements=measurements)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_setting_is_measured_and_nothing_stays(
    tmp_path: Path, engine: io_bench.Engine
) -> None:
    seen: list[Measurement] = []
    found = io_bench.measure(
        tmp_path,
        file_bytes="2MiB",
        blocks=("64KiB", 262144),
        depths=(1, 3),
        engine=engine,
        seconds=0.01,
        progress=seen.append,
    )
    assert list(found.measurements) == seen
    assert [(m.mix, m.block_bytes, m.depth) for m in seen] == [
        (mix, block, depth)
        for mix in ("read", "write", "mixed")
        for block in (65536, 262144)
        for depth in (1, 3)
    ]
    for m in seen:
        assert (m.read_bytes_per_second > 0) == (m.mix != "write")
        assert (m.write_bytes_per_second > 0) == (m.mix != "read")
        assert m.engine.startswith("io_uring") == (
            engine == "io_uring" or (engine == "auto" and not _C.why_no_io_uring())
        )
    assert str(tmp_path / "castor.io-bench") in found.file
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_in_its_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "castor.io-bench").write_text("precious")
    with pytest.raises(castor.IoError, match="not a scratch file of castor's") as refused:
        io_bench.measure(tmp_path, file_bytes="1MiB", blocks=["4KiB"], seconds=0.01)
    assert refused.value.errno == errno.EEXIST
    assert (tmp_path / "castor.io-bench").read_text() == "precious"


def test_missing_directory_and_full_disk_are_named(tmp_path: Path) -> None:
    with pytest.raises(castor.IoError, match="Create the directory") as refused:
        io_bench.measure(tmp_path / "missing")
    assert refused.value.errno == errno.ENOENT
    with pytest.raises(castor.IoError, match=r"It needs 1024\.00 TiB .* free: free space") as full:
        io_bench.measure(tmp_path, file_bytes="1024TiB")
    assert full.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_on_one_path_are_refused(tmp_path: Path) -> None:
    bench = _C.IoBench(str(tmp_path), 4096, "threads")
    with pytest.raises(castor.IoError, match=r"in use by another castor job \(process \d+\)"):
        io_bench.measure(tmp_path, file_bytes="1MiB", blocks=["4KiB"], seconds=0.01)
    bench.close()
    with pytest.raises(castor.UsageError, match=r"removed by close"):
        bench.measure("read", 4096, 1, 0.01)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"blocks": ["5000B"]}, "multiple of 4096"),
        ({"blocks": ["2MiB"]}, "at most the file's 1048576"),
        ({"blocks": []}, "nothing to measure"),
        ({"depths": [4, 0], "blocks": ["4KiB"]}, "depth is 0"),
        ({"seconds": 0.0, "blocks": ["4KiB"]}, "seconds"),
        ({"engine": "libaio", "blocks": ["4KiB"]}, "unknown I/O engine 'libaio'"),
        ({"mixes": ["rw"], "blocks": ["4KiB"]}, "unknown I/O mix 'rw'"),
    ],
)
def test_nonsense_is_refused_and_leaves_nothing(
    tmp_path: Path, arguments: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        io_bench.measure(tmp_path, **({"file_bytes": "1MiB"} | arguments))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_cheapest_setting_within_five_percent_is_suggested() -> None:
    found = report(
        measurement("mixed", 900.0, depth=1),
        measurement("mixed", 960.0, depth=4),
        measurement("mixed", 1000.0, depth=64),
        measurement("mixed", 990.0, block_bytes=2**22, depth=1),
        measurement("read", 5000.0),
    )
    assert found.best("mixed").depth == 64
    # 4 MiB in flight each: the faster one of the two.
    assert (found.suggested().block_bytes, found.suggested().depth) == (2**22, 1)
    with pytest.raises(ValueError, match="mix='write'"):
        found.best("write")


@pytest.mark.parametrize(
    ("read", "write", "mixed", "duplex"),
    [
        (1000.0, 900.0, 1000.0, False),
        (1000.0, 900.0, 1900.0, True),
        # As fast as in turn, 1474, and well below the faster direction ...
        (1000.0, 2800.0, 1500.0, False),
        # ... which says nothing of how much the two get in each other's way.
        (1000.0, 2800.0, 2200.0, True),
    ],
)
def test_duplex_is_told_from_the_mixed_bandwidth(
    read: float, write: float, mixed: float, duplex: bool
) -> None:
    found = report(
        measurement("read", read), measurement("write", write), measurement("mixed", mixed)
    )
    assert found.full_duplex is duplex


@pytest.mark.parametrize(
    ("state_format", "per_param"),
    [("fp32", 12.0), ("split", 10.0), ("split_bf16", 6.0), ("split_int8", 4.03125)],
)
def test_a_step_reads_and_writes_all_of_the_state(state_format: str, per_param: float) -> None:
    assert io_bench.step_bytes(1e9, state_format) == per_param * 1e9
    found = report(measurement("mixed", 2e9))
    assert found.step_seconds(1e9, state_format) == per_param


@pytest.mark.parametrize(("params", "state_format"), [(0, "split"), (1e9, "int4"), (-1, "fp32")])
def test_steps_of_nothing_are_refused(params: float, state_format: str) -> None:
    with pytest.raises(ValueError, match=r"state format|model_params"):
        io_bench.step_bytes(params, state_format)


def test_the_report_says_what_a_run_needs(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(*(measurement(mix, 1e9) for mix in io_bench.MIXES))
    console = Console(width=200)
    io_bench.render(found, console)
    io_bench.render_step(found, console, 18e9, "split_bf16")
    said = capsys.readouterr().out
    assert "blocks of 1024 KiB, 4 in flight: 1,000 MB/s mixed, 4 MiB in flight" in said
    assert "reads and writes share one bandwidth" in said
    assert "18,000,000,000 parameters" in said
    assert "108.0 GB read and as much written, 216.0 s" in said


def test_the_command_measures_and_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["io-bench", str(tmp_path), "--size", "1MiB", "--block", "64KiB", "--depth", "2"]
    cli.app([*arguments, "--seconds", "0.01", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert [m["mix"] for m in found["measurements"]] == ["read", "write", "mixed"]
    cli.app(
        [*arguments, "--seconds", "0.01", "--model-params", "18e9", "--format", "split_bf16"],
        standalone_mode=False,
    )
    said = capsys.readouterr().out
    assert "suggested blocks of 64 KiB, 2 in flight" in said
    assert "108.0 GB read" in said
    with pytest.raises(ValueError, match="int4"):
        cli.app([*arguments, "--model-params", "1", "--format", "int4"], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []
