"""Each fault of scripts/mutants.toml can be planted, and the tests that should find it exist."""

import re
from typing import Any

import pytest

import mutants
from mutants import ROOT, Fault, TableError

ANY = r"\w+"
FAULT: dict[str, Any] = {
    "name": "n", "file": "f", "line": "a = b;", "fault": "a = c;", "breaks": "", "tests": []
}  # fmt: skip


def exists(test: str) -> bool:
    """Whether the sources have a test of the table."""
    if mutants.is_cpp(test):
        program, _, pattern = test.partition(":")
        suite, _, name = pattern.removeprefix("*").partition(".")
        folder = ROOT / "tests" / "cpp" / program.removesuffix("_tests")
        text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.cc"))
        wanted = rf"^TEST\w*\({suite},\s*{ANY if name == '*' else name}\)"
    else:
        file, _, function = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        wanted = rf"^def {function or f'test_{ANY}'}\("
    return re.search(wanted, text, re.M) is not None


def test_every_line_is_there_once_and_every_test_exists() -> None:
    faults = mutants.read_table(ROOT)
    assert len(faults) == 30
    for fault in faults.values():
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert fault.planted(text) != text
        assert fault.tests
        assert [test for test in fault.tests if not exists(test)] == []


@pytest.mark.parametrize(
    "test",
    [
        *("core_tests:NoSuchTest.*", "no_tests:LedgerTest.*", "core_tests:LedgerTest.NoSuch"),
        *("tests/python/test_no.py", "tests/python/test_ranks.py::test_no"),
    ],
)
def test_a_test_that_is_not_there_is_missed(test: str) -> None:
    assert not exists(test)


def test_a_fault_takes_the_place_of_its_line() -> None:
    assert Fault(**FAULT).planted("x;\n  a = b;\ny;\n") == "x;\n  a = c;\ny;\n"
    assert Fault(**FAULT | {"fault": ""}).planted("  a = b;\ny;\n").split() == ["y;"]


@pytest.mark.parametrize("text", ["", "a = b;  // why\n", "a = b;\n  a = b;\n"])
def test_a_line_that_is_not_there_once_is_named(text: str) -> None:
    with pytest.raises(TableError, match="n: f has"):
        Fault(**FAULT).planted(text)
