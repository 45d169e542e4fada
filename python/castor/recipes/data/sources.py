"""Finds the rows of a recipe's data: files, folders and names of the Hugging Face hub.

Files of JSON and text are not copied: their rows are places in them, and a row is read when it is
tokenised. Tables (CSV, Parquet, Arrow, the hub's data sets) are memory-mapped from
the cache of the datasets library (HF_DATASETS_CACHE).
"""

from __future__ import annotations

import codecs
import json
import mmap
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from datasets.table import InMemoryTable

from castor.config.names import did_you_mean
from castor.recipes.data import megatron
from castor.recipes.data.formats import FORMATS, BrokenRowError, detect

_TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_ROWS = (".jsonl", ".ndjson", ".json", ".txt")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BLOCK = 1 << 24
"""Bytes that are read at once to find lines, and to hash a file."""
_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
"""Strings of JSON, and the signs that end or begin a value."""
_BLANK = re.compile(rb"[ \t\r\n]*")

Reader = Callable[[dict[str, list[Any]], int], list[tuple[str, Any]]]
"""Reads a batch of places, the first of which has the given number: each row's place and content.
The content is a BrokenRowError where the row is none, and None for a line of blanks."""


@dataclass(frozen=True)
class Source:
    """Rows of one file, or of one table of the hub.

    Attributes:
        name: Path or name, as errors give it.
        rows: Data set with one row for each row of the source: its place, or its columns.
        key: Hash of the content.
        read: Reads a batch of `rows`.
        format_name: Format of the rows: one of FORMATS but "auto".
    """

    name: str
    rows: datasets.Dataset
    key: str
    read: Reader = field(repr=False)
    format_name: str = ""


def load(path: str, format_name: str = "auto") -> list[Source]:
    """Opens what a recipe names.

    Args:
        path: A file, a folder whose files are taken in the order of their names, the prefix of a
            pair of Megatron-LM's files, or the name of a data set of the hub.
        format_name: One of FORMATS. "auto" looks at the first row of each file.

    Returns:
        A source for each file that has rows.

    Raises:
        FileNotFoundError: There is nothing of that name.
        ValueError: A file is of no known kind, or its first row of no known format.
    """
    if format_name not in FORMATS:
        raise ValueError(
            f"format {format_name!r} is none{did_you_mean(format_name, FORMATS)}; formats are "
            f"{', '.join(FORMATS)}"
        )
    found = [_with_format(source, format_name) for source in _open(Path(path).expanduser(), path)]
    sources = [source for source in found if len(source.rows)]
    if not sources:
        raise ValueError(f"{path} has no rows")
    return sources


def _open(path: Path, given: str) -> Iterator[Source]:
    if path.is_dir():
        yield from _folder(path)
    elif path.suffix in (".bin", ".idx") or path.with_name(f"{path.name}.idx").is_file():
        yield _megatron(path)
    elif path.is_file():
        yield _file(path)
    elif path.suffix in (*_ROWS, *_TABLES) or not _HUB_NAME.fullmatch(given):
        raise FileNotFoundError(f"there is no file or folder {path}, which data names")
    else:
        yield _of_hub(given)


def _folder(path: Path) -> Iterator[Source]:
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        yield _table(str(path), datasets.load_from_disk(str(path)))
        return
    known = (*_ROWS, *_TABLES, ".idx")
    files = [file for file in sorted(path.rglob("*")) if file.suffix in known and file.is_file()]
    if not files:
        raise ValueError(f"the folder {path} has no file that ends in {', '.join(known)}")
    for file in files:
        yield _megatron(file) if file.suffix == ".idx" else _file(file)


def _file(path: Path) -> Source:
    if path.suffix in _TABLES:
        options = {"delimiter": "\t"} if path.suffix == ".tsv" else {}
        try:
            table = datasets.load_dataset(
                _TABLES[path.suffix], data_files=str(path), split="train", **options
            )
        except Exception as error:  # the reader of each kind of file has errors of its own
            cause = error.__cause__ or error
            raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {cause}") from error
        return _table(str(path), table, _hash(path))
    if path.suffix == ".json" and _begins_with(path, b"["):
        return _array(path)
    if path.suffix not in _ROWS:
        known = ", ".join((*_ROWS, *_TABLES, ".bin with .idx"))
        raise ValueError(f"{path} is of no known kind; rows are read from {known}")
    return _lines(path)


def in_memory(columns: Mapping[str, Any], key: str) -> datasets.Dataset:
    """Makes a data set of columns, with a hash of them as its fingerprint.

    datasets.Dataset.from_dict pickles the table for one, which pyarrow 26 allows only where
    datasets lies in a folder site-packages.
    """
    return datasets.Dataset(InMemoryTable(pa.table(dict(columns))), fingerprint=key)


def _hash(*files: Path) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _begins_with(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(mark)


def _line_ends(path: Path) -> npt.NDArray[np.int64]:
    """Returns the offset of each line break of a file, and the file's size."""
    breaks, begin = list[npt.NDArray[np.int64]](), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            breaks.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + begin)
            begin += len(block)
    return np.concatenate([*breaks, [begin]])


def _lines(path: Path) -> Source:
    """Opens a file that has a row in each line that is not blank."""
    ends = _line_ends(path)
    begins = np.concatenate(([0], ends[:-1] + 1))
    kept = ends > begins
    content = _text_line if path.suffix == ".txt" else _json_row
    return _of_places(path, begins[kept], ends[kept], np.flatnonzero(kept) + 1, content)


def _array(path: Path) -> Source:
    """Opens a file that is one array of JSON. Its rows are found by brackets, commas and strings.

    Raises:
        ValueError: The array has no end, or something follows it.
    """
    depth, begin, ends = 0, 0, _line_ends(path)
    places = array("q")  # begin and end of each row

    def line(at: int) -> int:
        return int(np.searchsorted(ends, at)) + 1

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for found in _MARKS.finditer(data):
            mark = found[0]
            if mark in b"[{":
                depth += 1
            elif mark in b"]}":
                depth -= 1
            if mark == b"[" and depth == 1:
                begin = _first(data, found.end())
            elif (mark == b"," and depth == 1) or (mark in b"]}" and depth == 0):
                if found.start() > begin:
                    places.extend((begin, found.start()))
                begin = _first(data, found.end())
                if depth == 0:
                    break
        if depth > 0:
            raise ValueError(
                f"{path}, line {line(begin)}: the file is no JSON: it ends within row "
                f"{len(places) // 2 + 1}, which begins here"
            )
        if rest := data[begin:].strip():
            raise ValueError(f"{path}, line {line(begin)}: {rest[:20].decode(errors='replace')!r} "
                             "follows the end of the array")  # fmt: skip
    begins, lasts = np.asarray(places).reshape(-1, 2).T
    return _of_places(path, begins, lasts, np.searchsorted(ends, begins) + 1, _json_row)


def _first(data: mmap.mmap, at: int) -> int:
    """Returns the place of the first character from `at` on that is not blank."""
    return _BLANK.match(data, at).end()  # type: ignore[union-attr] # it matches nothing too


def _of_places(
    path: Path,
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    lines: npt.NDArray[np.int64],
    content: Callable[[bytes], Any],
) -> Source:
    """Opens a file whose rows lie between given offsets.

    Args:
        path: The file.
        begins: Offset of each row's first byte.
        ends: Offset behind each row's last byte.
        lines: Number of the line in which each row begins, from 1.
        content: Reads a row of its bytes.
    """
    opened: list[mmap.mmap] = []

    def read(places: dict[str, list[Any]], first: int) -> list[tuple[str, Any]]:
        if not opened:
            with path.open("rb") as file:
                opened.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        found = list[tuple[str, Any]]()
        for begin, end, line in zip(*(places[name] for name in columns), strict=True):
            bare = opened[0][begin:end].strip()
            if line == 1:
                bare = bare.removeprefix(codecs.BOM_UTF8)
            found.append((f"{path}, line {line}", content(bare) if bare else None))
        return found

    columns, key = {"begin": begins, "end": ends, "line": lines}, _hash(path)
    return Source(str(path), in_memory(columns, key), key, read)


def _json_row(row: bytes) -> Any:
    try:
        found = json.loads(row)
    except json.JSONDecodeError as error:
        line = f" of its line {error.lineno}" if error.lineno > 1 else ""
        return BrokenRowError(f"the row is no JSON: {error.msg} at character {error.colno}{line}")
    except (UnicodeDecodeError, RecursionError) as error:
        return BrokenRowError(f"the row is no JSON: {error}")
    return BrokenRowError("the row is null, not an object with keys") if found is None else found


def _text_line(line: bytes) -> Any:
    try:
        return {"text": line.decode()}
    except UnicodeDecodeError as error:
        return BrokenRowError(f"the line is no UTF-8: {error}")


def _table(name: str, table: Any, key: str | None = None) -> Source:
    """Takes the rows of a table of the datasets library."""
    if isinstance(table, datasets.DatasetDict):
        if "train" not in table:
            raise ValueError(f"{name} has no split train; it has {', '.join(map(str, table))}")
        table = table["train"]
    columns = table.column_names

    def read(batch: dict[str, list[Any]], first: int) -> list[tuple[str, Any]]:
        rows = zip(*(batch[column] for column in columns), strict=True)
        return [
            (f"{name}, row {number}", dict(zip(columns, row, strict=True)))
            for number, row in enumerate(rows, first + 1)
        ]

    return Source(name, table, key or str(table._fingerprint), read)


def _of_hub(name: str) -> Source:
    try:
        table = datasets.load_dataset(name, split="train")
    except Exception as error:  # huggingface_hub's, and requests' and datasets' own
        raise ValueError(
            f"there is no file or folder {name}, and neither the hub nor the cache "
            f"({datasets.config.HF_DATASETS_CACHE}) gives a data set of that name: {error}"
        ) from error
    return _table(name, table)


def _megatron(path: Path) -> Source:
    tokens = megatron.TokenFile(path)
    files = megatron.paths(path)
    key = _hash(*files)
    rows = in_memory({"document": np.arange(len(tokens))}, key)

    def read(places: dict[str, list[Any]], first: int) -> list[tuple[str, Any]]:
        return [
            (f"{files[0]}, document {index}", tokens.document(index))
            for index in places["document"]
        ]

    return Source(str(files[0]), rows, key, read, "megatron")


def _with_format(source: Source, wanted: str) -> Source:
    """Returns the source with its format: the one that was asked for, or its first row's."""
    if source.format_name == "megatron" or wanted == "megatron":
        if source.format_name != "megatron" or wanted not in ("auto", "megatron"):
            raise ValueError(f"{source.name} is not of format {wanted}")
        return source
    return replace(source, format_name=_detected(source) if wanted == "auto" else wanted)


def _detected(source: Source) -> str:
    """Returns the format of the first row that is an object; "auto" where there are no rows."""
    first = ""
    for begin in range(0, len(source.rows), 100):
        for place, row in source.read(source.rows[begin : begin + 100], begin):
            if row is not None and not isinstance(row, dict) and not first:
                kind = f"the row is {type(row).__name__}, not an object with keys"
                first = f"; {place}: {row if isinstance(row, BrokenRowError) else kind}"
            if isinstance(row, dict):
                try:
                    return detect(list(row))
                except BrokenRowError as error:
                    raise ValueError(f"{place}: {error}") from None
    if len(source.rows):
        raise ValueError(f"{source.name} has no row that is an object with keys{first}")
    return "auto"
