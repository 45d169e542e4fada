"""Simulated scaling: curves of the fastest layouts, the page, and what `castor scaling` refuses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from castor.cli import app
from castor.errors import UsageError
from castor.planner.layout_report import BOUNDS
from castor.planner.scaling import Point, first_that_fits, scaling, sizes
from castor.planner.scaling_page import scaling_page
from test_layouts import FIGURES, cluster, config_file, search

NETWORK = {"network": "10GB/s", "network_latency_us": 20}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_file(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fitting(config: Path) -> Any:
    """Curves to two ranks, in which every point has a layout."""
    return scaling(search(config), cluster(), most=2)


def test_ranks_double_within_a_node_and_then_by_whole_nodes() -> None:
    found = sizes(cluster(nodes=3, **NETWORK), 20)
    shapes = [(of.nodes, of.ranks_per_node) for of in found]
    assert shapes == [(1, 1), (1, 2), (1, 4), (2, 4), (4, 4)]
    whole = cluster(nodes=3, **NETWORK)
    assert {of.machine for of in found} == {whole.machine}  # a rank's share of its node
    odd = cluster(ranks_per_node=6, **NETWORK)
    assert [of.ranks for of in sizes(odd, 12)] == [1, 2, 4, 6, 12]
    assert [of.ranks for of in sizes(odd, 5)] == [1, 2, 4]


@pytest.mark.whole
def test_a_point_is_the_fastest_layout_that_a_plan_finds(config: Path) -> None:
    on, of_model = cluster(nodes=2, **NETWORK), search(config, batch=16)
    found = scaling(of_model, on, most=16)
    assert [(p.ranks, p.batch) for p in found.weak] == [(1, 2), (2, 4), (4, 8), (8, 16), (16, 32)]
    assert [(p.ranks, p.batch) for p in found.strong] == [(n, 16) for n in (1, 2, 4, 8, 16)]
    described = found.weak[3]
    assert described.cost == found.strong[3].cost == search(config, batch=16).search(on).fitting[0]
    one = found.weak[0]
    assert first_that_fits(found.weak) is one
    assert one.of_linear(one) == 1.0
    for point in found.strong[1:]:
        assert point.tokens_per_second > found.strong[0].tokens_per_second
        assert point.of_linear(found.strong[0]) < 1.0  # this model has room on one rank
    assert of_model.workload.batch == 16


def test_samples_that_ranks_cannot_share_have_no_point_of_strong_scaling(config: Path) -> None:
    alone = cluster(ranks_per_node=1, **NETWORK)
    found = scaling(search(config, batch=3), alone, most=8)
    assert [p.ranks for p in found.weak] == [1, 2, 4, 8]
    assert [p.ranks for p in found.strong] == [1, 2, 4]  # stages, of six blocks


class _Structure(HTMLParser):
    """Elements that are open, and what is said in cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, _attributes: Any) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "line", "rect", "path", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, _attributes: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_has_what_the_curves_have_and_loads_nothing(fitting: Any) -> None:
    page = scaling_page(fitting, "Model", "a <model>", ["a & b"])
    structure = _Structure(page)
    assert not structure.open
    assert {"script", "link", "img"}.isdisjoint(structure.seen)
    assert "http" not in page.replace("http-equiv", "")
    for part in ("a &lt;model&gt;", "a &amp; b"):
        assert part in page
    for point in (*fitting.weak, *fitting.strong):
        assert f"{point.tokens_per_second:,.0f}" in structure.cells


def test_every_share_of_a_step_has_a_colour_and_a_name_of_its_own(fitting: Any) -> None:
    page = scaling_page(fitting, "Model", "t", [])
    colours = re.findall(r"fill:var\((--[a-z_]+)\)\"/></svg>([^<]+)</span>", page)
    assert len(colours) == 2 * len(BOUNDS)
    assert len(dict(colours)) == len({name for _, name in colours}) == len(BOUNDS)
    css = (resources.files("castor.report") / "page" / "page.css").read_text()
    values = [re.findall(rf"{colour}: (#[0-9a-f]+);", css) for colour in dict(colours)]
    assert len({light for light, _ in values}) == len(BOUNDS), "in the light theme"
    assert len({dark for _, dark in values}) == len(BOUNDS), "in the dark theme"


def test_a_page_of_points_of_which_some_or_all_have_no_room(fitting: Any) -> None:
    lacking = Point(ranks=1, batch=2, sequence=32, cost=None)
    points = type(fitting)(weak=[lacking, *fitting.weak[1:]], strong=[lacking])
    some = scaling_page(points, "Model", "t", [])
    cells = _Structure(some).cells
    assert cells.count("no layout fits") == 2
    assert "100%" in cells  # of the first that fits
    assert "The model fits on none of these." in some


def run(config: Path, directory: Path, *arguments: str, **changes: Any) -> Any:
    described = directory / "cluster.json"
    described.write_text(json.dumps(FIGURES | changes))
    command = ["scaling", str(config), "--cluster", str(described), "--seq", "32"]
    command += ["--precision", "fp32", *arguments]
    return CliRunner().invoke(app, command)


@pytest.mark.whole
def test_the_command_prints_both_curves_and_writes_the_page(config: Path, tmp_path: Path) -> None:
    page = tmp_path / "scaling.html"
    done = run(config, tmp_path, "--batch", "8", "--most-ranks", "8", "--output", str(page),
               **NETWORK)  # fmt: skip
    assert done.exit_code == 0, done.output
    for part in ("weak scaling", "strong scaling", f"A page of this is in {page}."):
        assert part in done.output
    assert page.read_text().startswith("<!doctype html>")
    done = run(config, tmp_path, "--batch", "8", "--most-ranks", "8", "--json", **NETWORK)
    figures = json.loads(done.output)
    assert [point["ranks"] for point in figures["weak"]] == [1, 2, 4, 8]
    assert all(point["tokens_per_second"] > 0 for point in figures["strong"])


def test_no_room_anywhere_is_said(config: Path, tmp_path: Path) -> None:
    done = run(config, tmp_path, "--batch", "4", "--most-ranks", "2", "--json",
               device_memory="16KiB")  # fmt: skip
    assert done.exit_code == 0
    points = json.loads(done.output)["weak"]
    assert [point["tokens_per_second"] for point in points] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "6"], "6 samples on 4 ranks leave none as many on each"),
        (["--batch", "8", "--most-ranks", "16"], "network is missing, which 4 nodes of 4 ranks"),
    ],
)
def test_what_makes_no_curve_is_named(
    arguments: list[str], message: str, config: Path, tmp_path: Path
) -> None:
    done = run(config, tmp_path, *arguments)
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


def test_a_page_that_cannot_be_written_is_named(config: Path, tmp_path: Path) -> None:
    done = run(config, tmp_path, "--batch", "4", "--most-ranks", "1", "--output",
               str(tmp_path / "no" / "s.html"))  # fmt: skip
    assert isinstance(done.exception, OSError)
    assert f"cannot write {tmp_path / 'no' / 's.html'}" in str(done.exception)
