"""Checks that docstrings of castor begin with the thing they are about.

A docstring that begins with "Of", "What", "Where" and their like has no subject: "Of parameters, by
precision." should be "Types of parameters, by precision." Usage: check_prose.py [ROOT]. Prints
"file:line: what is wrong" for each, and exits with 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_SUBJECT = {"Of", "What", "Where", "As", "That", "Those", "How", "Who", "Whose", "Which"}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every string that stands alone as a statement."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, first line of the text) of each docstring that begins without a subject."""
    for line, text in docstrings(source):
        if text.partition(" ")[0].rstrip(",") in WITHOUT_SUBJECT:
            yield line, text.partition("\n")[0]


def main(arguments: list[str]) -> int:
    """Prints the faults of all files; returns the exit status."""
    root = Path(arguments[0]) if arguments else ROOT
    package, found = root / "python" / "castor", 0
    for path in sorted(package.rglob("*.py")):
        for line, text in faults(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(root)}:{line}: begins without a subject: {text}")
            found += 1
    print(f"prose: {found} docstrings without a subject" if found else "prose: clean")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
