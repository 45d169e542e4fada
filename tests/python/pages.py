"""The documentation as data: its code blocks, and the names in them that must exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")],
)
HOLE = "…"
"""Stands for what a message fills in: a name, a number."""

# Python is run, sh and text are read for names, "" is a drawing. Nothing else may be written:
# another spelling of Python would slip through unrun.
LANGUAGES = {"python", "sh", "text", ""}
# Their "py" needs what `make integration` installs, and is run there.
OF_INTEGRATION = {"lightning.md", "lora.md"}
_FOLDERS = "benchmarks|cmake|csrc|docs|examples|python|scripts|tests|\\.ci"
_PATH = re.compile(rf"(?<![\w./-])((?:{_FOLDERS})/[\w./*-]*[\w*/])")
_MAKE = re.compile(
    r"(?:^|&&|;)[ \t]*make((?:[ \t]+(?:[A-Z_]+=(?:\"[^\"]*\"|[^\s`]*)|[a-z][\w-]*))+)", re.M
)
_MODULE = re.compile(r"python3? -m (castor[\w.]*)")
_CXX_TOKEN = re.compile(r'"((?:[^"\\\n]|\\.)*)"|;')


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    line: int
    """Of its first line of content, from 1."""
    text: str


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """The fenced blocks in their order, directives ({toctree}, {eval-rst}) left out."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8") if text is None else text)
    found = []
    for token in tokens:
        language = token.info.strip()
        if token.type == "fence" and token.map and not language.startswith("{"):
            found.append(Block(page, language, token.map[0] + 2, token.content))
    return found


def literals(page: Path) -> Iterator[str]:
    """What a reader may type or open: code spans, commands and texts."""
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        yield from (t.content for t in token.children or [] if t.type == "code_inline")
    yield from (block.text for block in blocks(page) if block.language in {"sh", "text"})


def run(page_blocks: list[Block]) -> None:
    """Executes Python blocks one after the other in one namespace; tracebacks name the page."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in page_blocks:
        source = "\n" * (block.line - 1) + block.text
        exec(compile(source, str(block.page), "exec"), namespace)


def links(page: Path) -> Iterator[str]:
    """Targets of links and pictures that are not addresses in the network."""
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        for child in token.children or []:
            target = str(child.attrGet("href") or child.attrGet("src") or "")
            if target and not re.match(r"[a-z]+:", target):
                yield target


def make_names() -> set[str]:
    """Targets of the Makefile, and variables that it or one of its scripts reads."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*)(?: [a-z][\w -]*)?:(?!=)", text, re.M))
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.sh"))
    return targets | set(re.findall(r"\b[A-Z][A-Z_]+\b", text + scripts))


def unknown_names(text: str) -> list[str]:
    """Make targets, make variables, files of the repository and modules that do not exist."""
    known = make_names()
    found = []
    for match in _MAKE.finditer(text):
        words = re.sub(r"=(\"[^\"]*\"|[^\s`]*)", "", match[1]).split()
        found += [f"make {word}" for word in words if word not in known]
    for match in _PATH.finditer(text):
        if not any(ROOT.glob(match[1].rstrip("/"))):
            found.append(match[1])
    found += [m[1] for m in _MODULE.finditer(text) if find_spec(m[1]) is None]
    return found


def messages_in_code() -> str:
    """Every string of castor's Python and C++, one a line, with a hole where values are put in."""
    found: list[str] = []
    for path in (ROOT / "python" / "castor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                values = (v.value if isinstance(v, ast.Constant) else HOLE for v in node.values)
                found.append("".join(map(str, values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        statement, end = "", 0
        text = path.read_text(encoding="utf-8")
        for token in _CXX_TOKEN.finditer(text):
            if token[0] == ";":
                found.append(statement)
                statement = ""
                continue
            adjacent = not text[end : token.start()].strip()  # "one " "string" over two lines
            statement += ("" if adjacent else HOLE) + token[1].replace('\\"', '"')
            end = token.end()
    return "\n".join(found)


def invented_parts(message: str, code: str) -> list[str]:
    """The stretches of a message between its holes that no string of the code contains."""
    parts = (" ".join(part.split()).removeprefix("; ") for part in message.split(HOLE))
    return [part for part in parts if len(part) > 3 and part not in code]
