"""docs/status.md holds what the records of benchmarks/results hold, and nothing else."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import status
from status import Row, Target

BAR = {"<=": "at most", ">=": "at least"}


def write(folder: Path, benchmark: str, **figures: Any) -> None:
    machine = {
        "commit": "0123abcd4567",
        "uncommitted_changes": True,
        "date": "2026-01-02T03:04:05+00:00",
        "load_average_1min": 0.25,
        "cpu": "Some CPU",
    }
    record = {"command": [f"{benchmark}.py", "--rounds", "3"], "machine": machine, **figures}
    (folder / f"{benchmark}.json").write_text(json.dumps(record), encoding="utf-8")


def spread(median: float) -> dict[str, float]:
    return {"median": median, "lower_quartile": median - 0.1, "upper_quartile": median + 0.1}


def test_the_committed_page_is_what_the_script_writes() -> None:
    page = status.PAGE.read_text(encoding="utf-8")
    assert status.rewritten(page, status.RESULTS) == page, "run python scripts/status.py"


def test_rows_of_one_benchmark_stand_together() -> None:
    groups = [benchmark for benchmark, _ in groupby(row.benchmark for row in status.ROWS)]
    assert len(groups) == len(set(groups))
    for benchmark in groups:
        assert (status.ROOT / "benchmarks" / f"{benchmark}.py").exists()


def test_targets_are_those_that_the_benchmarks_wrote() -> None:
    for row in status.ROWS:
        path = status.RESULTS / f"{row.benchmark}.json"
        if not path.exists():
            continue
        try:
            (value, *_rest) = status.found(json.loads(path.read_text("utf-8")), row.path)
        except (KeyError, IndexError):
            continue
        if isinstance(value, dict) and "bar" in value:
            sign, bound = value["bar"].split()
            assert row.target is not None
            assert row.target.words == f"{BAR[sign]} {float(bound):g}", row.what


@pytest.mark.parametrize(
    ("figure", "target", "line"),
    [
        (spread(1.5), status.at_most(1.5), "| 1.50 (1.40 to 1.60) | at most 1.5 | met |"),
        (spread(1.5), status.at_least(1.6), "| 1.50 (1.40 to 1.60) | at least 1.6 | **missed** |"),
        (0.5, None, "| 0.50 |  |  |"),
        (True, status.ALL, "| 1 of 1 | all | met |"),
        ([2.0, 1.0], status.FALLING, "| 2.00, 1.00 | falling | met |"),
        ([2.0, float("nan")], status.FALLING, "| 2.00, nan | falling | **missed** |"),
        (None, status.at_most(1.0), "| not measured yet | at most 1 |  |"),
    ],
)
def test_a_row_is_figure_target_and_verdict(
    figure: Any, target: Target | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "step", results={"tight": figure})
    row = Row("step", "a step", ("results", "tight"), target)
    monkeypatch.setattr(status, "ROWS", (row,))
    assert f"| a step {line}\n" in status.tables(tmp_path)


def test_paths_go_to_every_value_and_to_names_that_begin_so() -> None:
    record = {"cases": {"GPT-2, 3 layers": {"a": {"x": 1}, "b": {"x": 2}}}}
    assert status.found(record, ("cases", "GPT-2*", "*", "x")) == [1, 2]


def test_a_table_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "step", seconds=1.0)
    rows = (Row("step", "a step", ("seconds",)), Row("io", "a copy", ("seconds",)))
    monkeypatch.setattr(status, "ROWS", rows)
    found = status.tables(tmp_path)
    assert (
        "`python benchmarks/step.py --rounds 3`, commit 0123abcd with uncommitted changes, "
        "2026-01-02, Some CPU, load 0.2 before it:\n\n| what |" in found
    )
    assert "`python benchmarks/io.py`, not measured yet:\n\n| what |" in found
    assert "| a copy | not measured yet |  |  |\n" in found


def test_a_page_without_a_place_for_the_tables_is_refused() -> None:
    with pytest.raises(SystemExit, match="no place for the tables"):
        status.rewritten("# Status\n", status.RESULTS)
