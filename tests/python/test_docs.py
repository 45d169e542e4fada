"""The documentation holds: its Python runs, and the files, targets and errors it names exist."""

import inspect
import re
from pathlib import Path

import pytest

import castor
import castor.errors
import pages
from pages import PAGES, ROOT, Block

ERRORS = ROOT / "docs" / "errors.md"
REFERENCE = ROOT / "docs" / "reference"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_python(page: Path) -> list[Block]:
    return [block for block in pages.blocks(page) if block.language == "python"]


# peft asks transformers for what transformers 6 will rename.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# Dynamo reads what torch warns of, and inductor imports what it deprecates.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "page",
    [
        # Inductor compiles for half a minute.
        pytest.param(page, marks=[pytest.mark.slow] if page.name == "torch-compile.md" else [])
        for page in PAGES
        if with_python(page)
    ],
    ids=name_of,
)
def test_python_of_the_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pages.run(with_python(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_names_what_exists(page: Path) -> None:
    found = {block.language for block in pages.blocks(page)}
    assert found <= pages.LANGUAGES | ({"py"} if page.name in pages.OF_INTEGRATION else set())
    assert [name for text in pages.literals(page) for name in pages.unknown_names(text)] == []
    targets = [page.parent / link.split("#")[0] for link in pages.links(page)]
    assert [str(target) for target in targets if not target.exists()] == []


def test_readme_shows_the_example_that_can_be_run() -> None:
    block = with_python(ROOT / "README.md")[0]
    assert block.text == (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8")


def test_messages_on_the_errors_page_are_those_of_the_code() -> None:
    code = pages.messages_in_code()
    messages = [block.text for block in pages.blocks(ERRORS) if block.language == "text"]
    assert len(messages) > 20
    assert [part for text in messages for part in pages.invented_parts(text, code)] == []


def test_every_error_class_has_its_place() -> None:
    classes = [
        name
        for name, value in vars(castor.errors).items()
        if inspect.isclass(value) and issubclass(value, castor.Error)
    ]
    assert len(classes) >= 6
    headings = re.findall(r"^## .*$", ERRORS.read_text(encoding="utf-8"), re.M)
    assert [name for name in classes if not any(f"`{name}`" in h for h in headings)] == []


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    names = [name for name in castor.__all__ if not name.startswith("_")]
    assert [name for name in names if f"castor.{name}" not in text] == []


def test_the_tests_that_hold_properties_exist() -> None:
    text = (ROOT / "docs" / "properties.md").read_text(encoding="utf-8")
    python = re.findall(r"`(test_\w+\.py)`", text)
    cpp = re.findall(r"`(tests/cpp/\w+)`", text)
    assert len(python) > 60
    folders = [ROOT / "tests" / folder for folder in ("python", "recipes")]
    assert [name for name in python if not any((at / name).exists() for at in folders)] == []
    assert [name for name in cpp if not (ROOT / name).is_dir()] == []


# --- each guard fails where it should -----------------------------------------------------------


def test_a_failing_block_fails_at_its_line() -> None:
    text = (
        "# Title\n\n```python\nx = 1\n```\n\nThen:\n\n```python\nassert x\nraise KeyError(x)\n```\n"
    )
    with pytest.raises(KeyError) as error:
        pages.run(pages.blocks(Path("page.md"), text))
    last = error.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("page.md", 11)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("make demo", []),
        ('make lint && make pytest JOBS=2 PYTEST_ARGS="-k adam"  # and so on', []),
        ("to make dinner", []),
        ("make dinner", ["make dinner"]),
        ("make test COLOUR=red", ["make COLOUR"]),
        ("scripts/run_phases.sh and docs/design/", []),
        ("tests/python/test_*.py", []),
        ("scripts/no_such.sh", ["scripts/no_such.sh"]),
        ("python -m castor.errors", []),
        ("python -m castor.nothing", ["castor.nothing"]),
        ("/usr/docs/missing.md, build/docs/index.html", []),
    ],
)
def test_unknown_names_are_found(text: str, missing: list[str]) -> None:
    assert pages.unknown_names(text) == missing


def test_an_invented_message_is_found() -> None:
    code = pages.messages_in_code()
    assert pages.invented_parts("out of … memory: requested …, available …", code) == []
    assert pages.invented_parts("there is no trace yet; … finish", code) == []
    assert pages.invented_parts("the dog ate …", code) == ["the dog ate"]
