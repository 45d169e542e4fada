"""scripts/gpu_check.sh without a GPU: what becomes of tests that pass, fail, hang and die."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpu_phases import Batch, Command, Phase, Results, gtest_event, run_phase, write_summary

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """The real one, which a program that hangs moves on by an hour at a time: no limit is short."""

    def __init__(self, hours: Path) -> None:
        self.hours = hours
        hours.touch()

    def monotonic(self) -> float:
        return time.monotonic() + 3600 * self.hours.stat().st_size

    def hang(self, line: str, descriptor: str = "1") -> str:
        """Code that writes the line again and again, which has the time looked at."""
        return f"""
import os, time
while True:
    with open({str(self.hours)!r}, "a") as file:
        file.write("x")
    os.write(int({descriptor}), {line + chr(10)!r}.encode())
    time.sleep(0.1)
"""


def command(test: str, code: str, **more: Any) -> Command:
    return Command(test=test, argv=[sys.executable, "-c", code], **more)


def phase(*parts: Command | Batch, name: str = "tiny") -> Phase:
    return Phase(name=name, what="of this test", parts=parts)


def outcomes(results: Results, name: str = "tiny") -> dict[str, str]:
    return {record["test"]: record["outcome"] for record in results.of(name)}


def error_of(results: Results, test: str) -> str:
    (error,) = (r["error"] for r in results.of("tiny") if r["test"] == test)
    return str(error)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the phases go by."""
    clock = Clock(tmp_path / "hours")
    monkeypatch.setattr("gpu_phases.time", clock)
    return clock


def run(tmp_path: Path, *parts: Command | Batch, seconds: float = 600, **more: Any) -> Results:
    """A run of its own, over the results of those before."""
    results = Results(tmp_path, "a castor", **more)
    run_phase(phase(*parts), results, seconds)
    return results


def test_a_failure_stops_nothing_and_results_are_kept(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    count = f"f = open({str(runs)!r}, 'a'); f.write('x'); f.close(); "
    parts = [
        command("breaks", count + "raise SystemExit('no CUDA device: 0 found')"),
        command("passes", count),
        command("skips", count + "print('SKIPPED: no CUDA device')"),
        command("is killed", count + "import os; os.kill(os.getpid(), 9)"),
    ]
    expected = {"breaks": "failed", "passes": "passed", "skips": "skipped", "is killed": "failed"}
    results = run(tmp_path, *parts)
    assert outcomes(results) == expected
    assert "no CUDA device: 0 found" in error_of(results, "breaks")
    assert "killed by SIGKILL" in error_of(results, "is killed")
    assert runs.read_text() == "xxxx"
    assert outcomes(run(tmp_path, *parts)) == expected
    assert runs.read_text() == "xxxxx", "what was skipped is tried again, and nothing else"
    run(tmp_path, *parts, again=True)
    assert runs.read_text() == "xxxxxxxx", "again: all but what passed"
    assert not write_summary([phase(*parts)], results)
    summary = json.loads((tmp_path / "summary.json").read_text())["tiny"]
    assert summary["not_passed"] == ["breaks", "is killed"]
    assert (summary["passed"], summary["skipped"]) == (1, 1)


def test_results_of_another_castor_do_not_count(tmp_path: Path) -> None:
    part = command("passes", "pass")
    run(tmp_path, part)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"phase": "tiny", "te')  # killed while it wrote
    assert Results(tmp_path, "a castor").finished("tiny") == {"passes"}
    assert Results(tmp_path, "another castor").finished("tiny") == set()
    Results(tmp_path, "a castor").add("tiny", "later", "passed", 1.0)
    assert Results(tmp_path, "a castor").finished("tiny") == {"passes", "later"}


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path, clock: Clock) -> None:
    child = clock.hang("began")
    hang = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parts = [command("hangs", hang), command("passes", "pass")]
    results = run(tmp_path, *parts, seconds=math.inf)
    assert outcomes(results) == {"hangs": "timeout", "passes": "passed"}
    assert "began" in error_of(results, "hangs")


def test_what_the_phase_has_no_time_for_is_run_the_next_time(tmp_path: Path, clock: Clock) -> None:
    parts = [command("first", "pass"), command("second", clock.hang("began"), limit=math.inf)]
    assert outcomes(run(tmp_path, *parts)) == {"first": "passed"}
    assert outcomes(run(tmp_path, *parts)) == {"first": "passed", "second": "timeout"}


SUITE = """
import os, pytest
def test_passes(): pass
def test_fails(): assert 1 + 1 == 3
def test_skips(): pytest.skip("no such thing here")
@pytest.fixture
def broken(): pytest.fail("no CUDA device: 0 found")
def test_without_a_gpu(broken): pass
def test_dies(): os.abort()
def test_hangs(): exec(os.environ["HANG"])
def test_measures(record_property): record_property("parameters", 18)
@pytest.mark.parametrize("way", ["a:b", "c"])
def test_ways(way): pass
"""


def pytest_batch(tmp_path: Path, content: str, **environment: str) -> Batch:
    (tmp_path / "suite").mkdir(exist_ok=True)
    (tmp_path / "suite/test_tiny.py").write_text(content)
    argv = [sys.executable, "-m", "pytest", "-p", "gpu_results", "-p", "no:cacheprovider"]
    argv += ["--rootdir", str(tmp_path), "-c", "/dev/null", "--continue-on-collection-errors"]
    argv += ["--ignore=none", str(tmp_path / "suite")]
    env = {"PYTHONPATH": str(ROOT / "scripts"), **environment}
    return Batch(name="pytest", argv=lambda _: argv, env=env)


def test_every_test_of_a_suite_has_its_result(tmp_path: Path, clock: Clock) -> None:
    hang = clock.hang('{"event": "hangs"}', "os.environ['CASTOR_EVENTS_FD']")
    results = run(tmp_path, pytest_batch(tmp_path, SUITE, HANG=hang), seconds=math.inf)
    found = {test.split("::")[-1]: outcome for test, outcome in outcomes(results).items()}
    assert found == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_without_a_gpu": "failed",
        "test_dies": "died",
        "test_hangs": "timeout",
        "test_measures": "passed",
        "test_ways[a:b]": "passed",
        "test_ways[c]": "passed",
    }
    by_name = {r["test"].split("::")[-1]: r for r in results.of("tiny")}
    assert "assert (1 + 1) == 3" in by_name["test_fails"]["error"]
    assert "no such thing here" in by_name["test_skips"]["error"]
    assert "no CUDA device: 0 found" in by_name["test_without_a_gpu"]["error"]
    assert "killed by SIGABRT" in by_name["test_dies"]["error"]
    assert by_name["test_measures"]["parameters"] == 18


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    results = run(tmp_path, pytest_batch(tmp_path, "import no_such_module\n"))
    (test,) = outcomes(results)
    assert outcomes(results) == {test: "failed"}
    assert "no_such_module" in error_of(results, test)


def test_a_program_that_comes_to_no_test_is_a_failure_until_it_does(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "raise SystemExit('libcudart.so.13: not found')"]
    results = run(tmp_path, Batch(name="cpp", argv=lambda _: argv, parse=gtest_event))
    assert outcomes(results) == {"(cpp)": "died"}
    assert "libcudart.so.13: not found" in error_of(results, "(cpp)")
    said = ["[==========] Running 1 test from 1 test suite.", "[ RUN      ] GpuTest.Copies"]
    said += ["[       OK ] GpuTest.Copies (12 ms)"]
    good = [sys.executable, "-c", f"print({chr(10).join(said)!r})"]
    results = run(tmp_path, Batch(name="cpp", argv=lambda _: good, parse=gtest_event))
    assert outcomes(results) == {"(cpp)": "passed", "GpuTest.Copies": "passed"}


def test_a_gtest_program_is_started_again_where_it_died(tmp_path: Path) -> None:
    program = """
import os, sys
finished = sys.argv[1].split("*-")[1].split(":")
tests = [t for t in ("Kinds/A.Copies/fp32", "B.Dies", "C.Fails") if t not in finished]
print(f"[==========] Running {len(tests)} tests from 1 test suite.")
for test in tests:
    print(f"[ RUN      ] {test}", flush=True)
    if test == "B.Dies":
        os.abort()
    if test == "C.Fails":
        print("gpu.cc:3: Failure\\nno CUDA device: 0 found")
        print(f"[  FAILED  ] {test}, where GetParam() = 3 (1 ms)")
    else:
        print(f"[       OK ] {test} (20 ms)")
print("[  FAILED  ] C.Fails, where GetParam() = 3")
"""

    def argv(finished: list[str]) -> list[str]:
        return [sys.executable, "-c", program, f"--gtest_filter=*-{':'.join(finished)}"]

    results = run(tmp_path, Batch(name="cpp", argv=argv, parse=gtest_event))
    expected = {"Kinds/A.Copies/fp32": "passed", "B.Dies": "died", "C.Fails": "failed"}
    assert outcomes(results) == expected
    assert error_of(results, "C.Fails") == "gpu.cc:3: Failure\nno CUDA device: 0 found"


def test_a_program_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    parts = [
        Command(test="nothing", argv=["/no/such/program"]),
        Batch(name="cpp", argv=lambda _: ["/no/such/program"], parse=gtest_event),
        Batch(name="pytest", argv=lambda _: ["/no/such/program"]),
    ]
    results = run(tmp_path, *parts, command("passes", "pass"))
    expected = {"nothing": "failed", "(cpp)": "failed", "(pytest)": "failed", "passes": "passed"}
    assert outcomes(results) == expected
    assert "No such file or directory: '/no/such/program'" in error_of(results, "nothing")


def test_a_program_that_repeats_a_finished_test_is_ended(tmp_path: Path) -> None:
    said = ["[==========] Running 1 test from 1 test suite.", "[ RUN      ] B.Dies"]
    code = f"import os; print({chr(10).join(said)!r}, flush=True); os.abort()"
    argv = [sys.executable, "-c", code]
    results = run(tmp_path, Batch(name="cpp", argv=lambda _: argv, parse=gtest_event))
    assert outcomes(results) == {"B.Dies": "died", "(cpp)": "failed"}


def gpu_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/gpu_check.sh", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment,
    )


def test_phases_are_run_by_name(tmp_path: Path) -> None:
    names = gpu_check("--list").stdout.split()
    for name in ("machine", "cpp", "pytest-cuda", "pytest-cuda-session", "bench-4096", "18b"):
        assert name in names
    done = gpu_check("--phase", "nosuch", "--results", str(tmp_path))
    assert done.returncode != 0
    assert "no phase nosuch; there are machine, build, cpp" in done.stderr
    done = gpu_check("--wheel", str(tmp_path / "castor.whl"))
    assert f"{tmp_path}/castor.whl: there is no such file" in done.stderr


@pytest.mark.parametrize("allowed", [False, True])
def test_a_missing_gpu_is_named(tmp_path: Path, allowed: bool) -> None:
    flags = ["--allow-no-gpu"] if allowed else []
    done = gpu_check("--phase", "machine", "--results", str(tmp_path), *flags)
    assert done.returncode == (0 if allowed else 1), done.stdout + done.stderr
    assert ("skipped" if allowed else "failed") + "  " in done.stdout
    assert "no CUDA device: " in done.stdout
    facts = json.loads((tmp_path / "machine.json").read_text())
    assert facts["num_cpus"] >= 1
    assert isinstance(facts["gpu"], str)
