"""Checks that comments begin with the thing they are about, and that docs have short sentences.

A docstring, or a comment of a C++ header, that begins with "Of", "What", "Where" and their like has
no subject: "Of parameters, by precision." should be "Types of parameters, by precision." A sentence
of README, CONTRIBUTING and docs, outside tables and design notes, has at most 35 words. Usage:
check_prose.py [ROOT]. Prints "file:line: what is wrong" for each, and exits with 1 if there is one.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_SUBJECT = {"Of", "What", "Where", "As", "That", "Those", "How", "Who", "Whose", "Which"}
MOST_WORDS = 35


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


def comment_faults(header: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each doc comment of a C++ header that begins without a subject."""
    within = False
    for number, line in enumerate(header.splitlines(), 1):
        comment = re.match(r"(?P<code>.*?)///(?P<behind><)? *(?P<text>.*)", line)
        begins = comment and (comment["behind"] or not within)
        within = bool(comment and not comment["behind"])
        if comment and begins:
            word = re.split(r"[ ,.:;]", comment["text"])[0]
            if word.capitalize() in WITHOUT_SUBJECT:
                yield number, comment["text"]


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text on one line) of each paragraph and list item, without code and tables."""
    begin, lines, in_code = 1, list[str](), False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        text = "" if in_code or fence or line.startswith(("|", "#")) else line.strip()
        item = re.match(r"[-*] |\d+\. ", text)
        if lines and (not text or item):
            yield begin, " ".join(lines)
            lines = []
        if text:
            begin = begin if lines else number
            lines.append(text[item.end() :] if item else text)


def long_sentences(page: str) -> Iterator[tuple[int, str]]:
    """Yields (line of the paragraph, sentence) of each that has more than MOST_WORDS."""
    for line, text in paragraphs(page):
        for sentence in re.split(r"(?<=[.!?:])\s+", text):
            if len(sentence.split()) > MOST_WORDS:
                yield line, sentence


def main(arguments: list[str]) -> int:
    """Prints the faults of all files; returns the exit status."""
    root = Path(arguments[0]) if arguments else ROOT
    found = 0
    for path in sorted((root / "python" / "castor").rglob("*.py")):
        for line, text in faults(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(root)}:{line}: begins without a subject: {text}")
            found += 1
    for path in sorted((root / "csrc").rglob("*.h")):
        for line, text in comment_faults(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(root)}:{line}: begins without a subject: {text}")
            found += 1
    pages = [path for path in sorted(root.glob("docs/**/*.md")) if "design" not in path.parts]
    for path in (*sorted(root.glob("*.md")), *pages):
        if path.name == "CHANGELOG.md":
            continue
        for line, text in long_sentences(path.read_text(encoding="utf-8")):
            words = len(text.split())
            print(f"{path.relative_to(root)}:{line}: a sentence of {words} words: {text[:60]}...")
            found += 1
    print(f"prose: {found} faults" if found else "prose: clean")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
