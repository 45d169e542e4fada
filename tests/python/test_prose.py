"""scripts/check_prose.py finds comments without a subject and long sentences, and no others."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_prose.py"


def check(root: Path | None = None) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), *([str(root)] if root else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_castor_is_clean() -> None:
    assert check() == (0, "prose: clean\n")


def test_each_docstring_without_a_subject_is_named(tmp_path: Path) -> None:
    package = tmp_path / "python" / "castor"
    package.mkdir(parents=True)
    (package / "module.py").write_text(
        '"""Often used."""\n'
        "SIZE = 1\n"
        '"""Of a chunk."""\n'
        "def f() -> None:\n"
        '    """What it does.\n\n    And more.\n    """\n'
        '    return "Where strings are no docstrings"\n'
    )
    status, said = check(tmp_path)
    assert status == 1
    assert said.splitlines() == [
        "python/castor/module.py:3: begins without a subject: Of a chunk.",
        "python/castor/module.py:5: begins without a subject: What it does.",
        "prose: 2 faults",
    ]


def test_each_comment_of_a_header_without_a_subject_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "csrc" / "core"
    folder.mkdir(parents=True)
    (folder / "chunk.h").write_text(
        "/// A chunk of parameters.\n"
        "/// What follows in a comment is no beginning.\n"
        "struct Chunk {\n"
        "  /// Of its slot.\n"
        "  int bytes = 0;\n"
        "  int used = 0;    ///< bytes that parameters take\n"
        "  int number = 0;  ///< where it stands\n"
        "  /// What it is for.\n"
        "  int use = 0;\n"
        "  // What code does may be said in any way.\n"
        "};\n"
    )
    status, said = check(tmp_path)
    assert status == 1
    assert said.splitlines() == [
        "csrc/core/chunk.h:4: begins without a subject: Of its slot.",
        "csrc/core/chunk.h:7: begins without a subject: where it stands",
        "csrc/core/chunk.h:8: begins without a subject: What it is for.",
        "prose: 3 faults",
    ]


def test_each_long_sentence_of_the_docs_is_named(tmp_path: Path) -> None:
    long = " ".join(["word"] * 36) + "."
    guides = tmp_path / "docs" / "guides"
    guides.mkdir(parents=True)
    (tmp_path / "docs" / "design").mkdir()
    (tmp_path / "docs" / "design" / "note.md").write_text(long)
    (tmp_path / "CHANGELOG.md").write_text(long)
    (guides / "page.md").write_text(
        f"# {long}\n\n| {long} | table |\n\n```text\n{long}\n```\n\n"
        f"Short. {long[:-1]}\nmore.\n\n- {long[5:]} An item.\n- {long}\n"
    )
    status, said = check(tmp_path)
    assert status == 1
    assert said.splitlines() == [
        "docs/guides/page.md:9: a sentence of 37 words: " + long[:60] + "...",
        "docs/guides/page.md:13: a sentence of 36 words: " + long[:60] + "...",
        "prose: 2 faults",
    ]
