"""Finds the rows of a recipe's data: files, folders and names of the Hugging Face hub.

Files of JSON and text are not copied: their rows are places in them, and a row is read when it is
tokenised. The places, and tables (CSV, Parquet, Arrow, the hub's data sets), are memory-mapped
from the cache of the datasets library (HF_DATASETS_CACHE).
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import mmap
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from castor.checkpoint.files import write_file
from castor.config.names import did_you_mean
from castor.recipes.data import megatron
from castor.recipes.data.formats import FORMATS, BrokenRowError, detect

_TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_ROWS = (".jsonl", ".ndjson", ".json", ".txt")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BLOCK = 1 << 22
"""Bytes that are read at once to find lines, and to hash a file."""
_VALUES = 1 << 16
"""Values of an array, or documents, whose places are written at once."""
_PLACES = ("begin", "end", "line")
"""Offsets of a row's first byte and behind its last one, and the line in which it begins."""
_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
"""Strings of JSON, and the signs that end or begin a value."""
_BLANK = re.compile(rb"[ \t\r\n]*")

Columns: TypeAlias = tuple[npt.NDArray[np.integer[Any]], ...]
"""Values of several columns."""
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
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ValueError(f"{path} is in UTF-16; save it in UTF-8")
    if path.suffix in _TABLES:
        try:
            table = datasets.load_dataset(
                _TABLES[path.suffix], data_files=str(path), split="train", **_options(path)
            )
        except Exception as error:  # the reader of each kind of file has errors of its own
            cause = error.__cause__ or error
            raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {cause}") from error
        return _table(str(path), table, _hash(path))
    if path.suffix == ".json" and _begins_with(path, b"["):
        return _of_places(path, _values, _json_row)
    if path.suffix not in _ROWS:
        known = ", ".join((*_ROWS, *_TABLES, ".bin with .idx"))
        raise ValueError(f"{path} is of no known kind; rows are read from {known}")
    return _of_places(path, _lines, _text_line if path.suffix == ".txt" else _json_row)


def _options(path: Path) -> dict[str, Any]:
    """Returns how datasets reads a table: all columns of a CSV file are texts.

    It would take answers such as 42 for numbers, and NA or None for nothing.
    """
    if _TABLES[path.suffix] != "csv":
        return {}
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file, delimiter=delimiter), [])
    if len(set(names)) < len(names):
        raise ValueError(f"a name is twice in its first line ({', '.join(names)})")
    features = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
    return {"delimiter": delimiter, "na_filter": False, "features": features}


def cache() -> Path:
    """Returns castor's folder in the cache of datasets, which is looked up anew each time."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "castor"


def stored(name: str, columns: Sequence[str], blocks: Iterable[Columns]) -> datasets.Dataset:
    """Returns a data set of numbers that lie in a file of the cache, not in memory.

    Args:
        name: Name of the file: a hash of what the values follow from. A file that is there is
            taken.
        columns: Names of the columns.
        blocks: The columns' values, part by part; none is below 0.
    """
    path = cache() / "places" / f"{name}.arrow"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, _arrow_stream(columns, blocks))
    return datasets.Dataset.from_file(str(path))


def _arrow_stream(columns: Sequence[str], blocks: Iterable[Columns]) -> Iterator[bytes]:
    """Yields the bytes of a stream of Arrow, which memory is mapped to."""
    schema = pa.schema({name: pa.uint64() for name in columns})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        for block in blocks:
            arrays = [pa.array(column, pa.uint64()) for column in block]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            yield sink.getvalue()
            sink.seek(0)
            sink.truncate()
    yield sink.getvalue()


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


def _lines(path: Path) -> Iterator[Columns]:
    """Yields begin, end and number of each line of a file that is not empty, in blocks."""
    begin, number = 0, 1  # of the line that the next block goes on with
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            breaks = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            ends = breaks + (file.tell() - len(block))
            begins = np.concatenate(([begin], ends + 1))
            numbers = number + np.arange(len(ends))
            kept = ends > begins[:-1]
            yield begins[:-1][kept], ends[kept], numbers[kept]
            begin, number = int(begins[-1]), number + len(ends)
        if file.tell() > begin:
            yield tuple(np.asarray([one]) for one in (begin, file.tell(), number))


def _values(path: Path) -> Iterator[Columns]:
    """Yields begin, end and line of each value of a file that is one array of JSON, in blocks.

    They are found by brackets, commas and strings.

    Raises:
        ValueError: The array has no end, or something follows it.
    """
    depth, begin, count, line, seen = 0, 0, 0, 1, 0
    places = array("q")  # begin, end and line of each value of a block

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for found in _MARKS.finditer(data):
            mark = found[0]
            if mark in b"[{":
                depth += 1
            elif mark in b"]}":
                depth -= 1
            ends = (mark == b"," and depth == 1) or (mark in b"]}" and depth == 0)
            if ends and found.start() > begin:
                places.extend((begin, found.start(), line))
                count += 1
            if ends or (mark == b"[" and depth == 1):
                begin = _first(data, found.end())
                line, seen = line + data[seen:begin].count(b"\n"), begin
            if len(places) >= 3 * _VALUES:
                yield tuple(np.asarray(places).reshape(-1, 3).T)
                places = array("q")
            if ends and depth == 0:
                break
        if depth > 0:
            raise ValueError(
                f"{path}, line {line}: the file is no JSON: it ends within row {count + 1}, which "
                "begins here"
            )
        if rest := data[begin:].strip():
            raise ValueError(f"{path}, line {line}: {rest[:20].decode(errors='replace')!r} "
                             "follows the end of the array")  # fmt: skip
    yield tuple(np.asarray(places).reshape(-1, 3).T)


def _first(data: mmap.mmap, at: int) -> int:
    """Returns the place of the first character from `at` on that is not blank."""
    return _BLANK.match(data, at).end()  # type: ignore[union-attr] # it matches nothing too


def _of_places(
    path: Path, places: Callable[[Path], Iterator[Columns]], content: Callable[[bytes], Any]
) -> Source:
    """Opens a file whose rows lie between offsets.

    Args:
        path: The file.
        places: `_lines` or `_values`, which finds them.
        content: Reads a row of its bytes.
    """
    opened: list[mmap.mmap] = []

    def read(places: dict[str, list[Any]], first: int) -> list[tuple[str, Any]]:
        if not opened:
            with path.open("rb") as file:
                opened.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        found = list[tuple[str, Any]]()
        for begin, end, line in zip(*(places[name] for name in _PLACES), strict=True):
            bare = opened[0][begin:end].strip()
            if line == 1:
                bare = bare.removeprefix(codecs.BOM_UTF8)
            found.append((f"{path}, line {line}", content(bare) if bare else None))
        return found

    key = _hash(path)
    return Source(str(path), stored(f"{key}{places.__name__}", _PLACES, places(path)), key, read)


def _json_row(row: bytes) -> Any:
    try:
        found = json.loads(row)
    except json.JSONDecodeError as error:
        line = f" of its line {error.lineno}" if error.lineno > 1 else ""
        said = error.msg.removesuffix(" at")
        return BrokenRowError(f"the row is no JSON: {said} at character {error.colno}{line}")
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
    counts = (
        (np.arange(at, min(at + _VALUES, len(tokens))),) for at in range(0, len(tokens), _VALUES)
    )
    rows = stored(key, ["document"], counts)

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
                if isinstance(row, list):
                    kind += " (the name of a file that is one array ends in .json)"
                first = f"; {place}: {row if isinstance(row, BrokenRowError) else kind}"
            if isinstance(row, dict):
                try:
                    return detect(list(row))
                except BrokenRowError as error:
                    raise ValueError(f"{place}: {error}") from None
    if len(source.rows):
        raise ValueError(f"{source.name} has no row that is an object with keys{first}")
    return "auto"
