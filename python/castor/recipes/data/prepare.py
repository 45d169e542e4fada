"""Makes the data sets that a recipe trains on and is evaluated on.

Rows are tokenised once, in parts of 20,000, by datasets.map. Each part is a file in the cache of
the datasets library (HF_DATASETS_CACHE, in its folder castor) under the hash of the content, the
tokenizer, the template and the settings. A part is renamed when it is complete: a run that was
stopped goes on at the first part that is not there.

All that there is for each row lies in these files, and is read in blocks: the memory that is taken
does not grow with the rows.
"""

from __future__ import annotations

import errno
import functools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from castor.errors import UsageError
from castor.recipes.data import IGNORED
from castor.recipes.data.formats import BrokenRowError, Message, Preference, Text, parse
from castor.recipes.data.sources import Columns, Source, cache, load, stored
from castor.recipes.data.tokens import Spans, Tokenizing, Tokens
from castor.recipes.recipe import OF_PAIRS, DataSection, DataSource

ROWS_PER_PART = 20_000
_ROWS_PER_BATCH = 1000
_LAYOUT = 5
"""Version of the cached files; another one when their content changes for the same settings."""
_PACKAGES = ("datasets", "transformers", "tokenizers", "jinja2", "trl")
"""Packages that read, render, tokenise and pack: another version makes what is cached anew."""
_PACKED_TOKENS = 1 << 20
"""Tokens that are packed at once, in memory."""
_MOST_NAMED = 5
"""Number of broken rows that are named."""
_PARTS = ("prompt", "chosen", "rejected")
_OF_TOKENS = {"input_ids": datasets.List(datasets.Value("int32"))}
_OF_TOKENS["labels"] = _OF_TOKENS["input_ids"]
_TEXT = datasets.Value("string")
_FIGURES = ("length", "counted", "outcome")
"""Tokens of a row before truncation, those that the loss counts after it, and the Outcome."""
_STATISTICS = {**dict.fromkeys(_FIGURES, datasets.Value("int32")), "why": _TEXT}
"""Columns of every row; `why` says of a broken one why it is."""


class Outcome(IntEnum):
    """Ends that the tokenising of a row can have; rows with the first three are trained on."""

    KEPT = 0
    TRUNCATED = 1
    SPLIT = 2
    """Longer than a sequence, by truncation: split several of them."""
    TOO_LONG = 3
    """Left out, by truncation: drop."""
    WITHOUT_LOSS = 4
    """Left out: the loss would count none of its tokens, perhaps after truncation."""
    BROKEN = 5
    """Left out, by broken_rows: skip."""
    BLANK = 6
    """A line of blanks, which is no row."""


@dataclass(frozen=True)
class Prepared:
    """Data sets, ready for a trainer.

    Attributes:
        train: Rows to train on. Of sft and pretrain `input_ids` and `labels` (-100 where the loss
            counts nothing), int32, and `seq_lengths`, the tokens of each document in a row, where
            rows are packed. Of dpo and reward `prompt`, `chosen` and `rejected`.
        held_out: Rows to evaluate on, with the same columns; None where held_out is 0.
        outcomes: Number of rows of all sources, the held-out ones too, by outcome.
        lengths: Number of rows of all sources by their tokens before truncation; of a pair those of
            the longer answer with its prompt. Rows that could not be tokenised are left out.
        broken: The first broken rows, each with its file and line, where they are skipped.
        num_tokens: Tokens of train; of pairs those of the longer answer with its prompt.
        num_counted: Those of them that the loss counts; 0 for pairs.
        density: Share of train's rows times max_length that holds tokens; None without packing.
        cache: Folder of the tokenised parts.
    """

    train: datasets.Dataset
    held_out: datasets.Dataset | None
    outcomes: Counter[Outcome]
    lengths: Counter[int] = field(repr=False)
    broken: tuple[str, ...]
    num_tokens: int
    num_counted: int
    density: float | None
    cache: Path


def prepare(data: DataSection, tokenizer: Any, *, method: str) -> Prepared:
    """Loads, checks, tokenises, splits, mixes and packs what a recipe names.

    The same data and settings give the same rows in the same order. A source's weight says how
    often its rows are taken: 1 each once, 2 each twice, 0.5 a random half of them.

    Args:
        data: The section of the recipe.
        tokenizer: The model's tokenizer, of transformers.
        method: "sft", "pretrain", "dpo" or "reward".

    Raises:
        FileNotFoundError: A path is not there.
        ValueError: Rows do not fit the method, a row is broken or too long and is to be refused,
            the tokenizer lacks a template or an end token, or no row is left to train on.
        UsageError: The cache has no room; parts that are complete stay, and go on later.
    """
    work = _Work(data, tokenizer, method)
    began = time.time()
    try:
        return _prepared(work, data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # datasets leaves the part that it was writing.
        for path in work.cache.rglob("tmp*"):
            if path.is_file() and path.stat().st_mtime >= began:
                path.unlink(missing_ok=True)
        raise UsageError(
            f"{work.cache} has no room for the tokenised rows; make some, or name another folder "
            "with HF_DATASETS_CACHE"
        ) from error


def _prepared(work: _Work, data: DataSection) -> Prepared:
    """Prepares the rows of a recipe; see `prepare`."""
    given = [DataSource(path=data.train)] if isinstance(data.train, str) else data.train
    sources, weights = list[_Tokenised](), list[float]()
    for one in given:
        opened = work.open(one.path, data.format if one.format == "auto" else one.format)
        sources += opened
        weights += [one.weight] * len(opened)
    others, share = list[_Tokenised](), data.held_out
    if isinstance(share, str):
        others, share = work.open(share, data.format), 0
    every = [*sources, *others]
    outcomes = sum((source.counts[0] for source in every), Counter[Outcome]())
    lengths = sum((source.counts[1] for source in every), Counter[int]())
    mixture = _Mixture(sources, weights, share, data.seed)
    train = work.joined(mixture, "train")
    if train is None:
        listed = ", ".join(
            f"{count} {outcome.name.lower().replace('_', ' ')}"
            for outcome, count in sorted(outcomes.items())
        )
        raise ValueError(
            f"no row of {', '.join(one.path for one in given)} is left to train on: {listed}, and "
            f"held_out is {data.held_out}"
        )
    if others:  # a file of rows to evaluate on, all of which are taken
        held_out = work.joined(_Mixture(others, [1.0] * len(others), 0, data.seed), "train")
    else:
        held_out = work.joined(mixture, "held-out")
    return Prepared(
        train=train.rows,
        held_out=None if held_out is None else held_out.rows,
        outcomes=outcomes,
        lengths=lengths,
        broken=tuple(name for source in every for name in source.broken())[:_MOST_NAMED],
        num_tokens=train.num_tokens,
        num_counted=train.num_counted,
        density=train.density,
        cache=work.cache,
    )


@dataclass(frozen=True)
class _Joined:
    """Rows of all sources for a trainer, with the figures of `Prepared`."""

    rows: datasets.Dataset
    num_tokens: int
    num_counted: int
    density: float | None


@dataclass(frozen=True)
class _Tokenised:
    """One source with its tokenised rows, in the source's order; rows left out are empty."""

    source: Source
    table: datasets.Dataset
    key: str

    def _blocks(self) -> Iterator[Columns]:
        """Yields the columns of _FIGURES."""
        return _blocks(self.table.select_columns(list(_FIGURES)))

    @functools.cached_property
    def counts(self) -> tuple[Counter[Outcome], Counter[int]]:
        """Number of rows by outcome; number of those with tokens by these, before truncation."""
        outcomes, lengths = Counter[int](), Counter[int]()
        for length, _, outcome in self._blocks():
            outcomes.update(outcome.tolist())
            lengths.update(length[length > 0].tolist())
        return Counter({Outcome(one): count for one, count in outcomes.items()}), lengths

    @property
    def num_usable(self) -> int:
        """Number of rows that can be trained on."""
        return sum(count for outcome, count in self.counts[0].items() if outcome <= Outcome.SPLIT)

    def usable(self, first: int) -> Iterator[Columns]:
        """Yields index, length and counted tokens of the rows that can be trained on.

        Args:
            first: Index of the first row of the source.
        """
        for length, counted, outcome in self._blocks():
            at = np.flatnonzero(outcome <= Outcome.SPLIT)
            yield first + at, length[at], counted[at]
            first += len(outcome)

    def broken(self) -> list[str]:
        """Names the first broken rows, and why they are."""
        reasons, named = self.table.data.column("why"), list[str]()
        for index in pc.indices_nonzero(reasons.is_valid())[:_MOST_NAMED].to_pylist():
            ((place, _),) = self.source.read(self.source.rows[index : index + 1], index)
            named.append(f"{place}: {reasons[index]}")
        return named


def _blocks(table: datasets.Dataset) -> Iterator[Columns]:
    """Yields the columns of numbers of a table, block by block."""
    for block in table.with_format("arrow").iter(_ROWS_PER_BATCH):
        yield tuple(column.to_numpy() for column in block.columns)


class _Mixture:
    """Chooses rows of tokenised sources: held-out ones, and those to train on.

    A row is its index in all sources, its length and its counted tokens. Rows come in blocks, and
    chance decides block by block.

    Args:
        sources: The sources.
        weights: Number of times that each source's rows are trained on; of a fraction, randomly
            drawn rows are taken once more.
        held_out: Share or number of rows of all sources that are held out.
        seed: Seed of chance.

    Raises:
        ValueError: All rows would be held out.
    """

    def __init__(
        self, sources: list[_Tokenised], weights: list[float], held_out: float, seed: int
    ) -> None:
        self.sources, self._weights, self._seed = sources, weights, seed
        self._sizes = [source.num_usable for source in sources]
        total = sum(self._sizes)
        count = int(held_out) if held_out >= 1 else round(total * held_out)
        if 0 < held_out < 1:
            count = max(count, 1)
        if count >= total > 0:
            raise ValueError(
                f"data.held_out is {held_out}: {count} of {total} rows would leave none to train "
                "on; give fewer"
            )
        random = np.random.default_rng([seed, 0])
        drawn = random.multivariate_hypergeometric(self._sizes, min(count, total))
        self._held_out = drawn.tolist()
        self.key = _hash([source.key for source in sources], weights, count, seed)

    @property
    def is_all(self) -> bool:
        """Whether all rows are trained on, each once, in their order."""
        every = sum(len(source.table) for source in self.sources)
        return not any(self._held_out) and sum(self._sizes) == every and set(self._weights) == {1}

    def held_out(self) -> Iterator[Columns]:
        """Yields the rows to evaluate on."""
        for number in range(len(self.sources)):
            yield from self._half(number, held_out=True)

    def train(self) -> Iterator[Columns]:
        """Yields the rows to train on."""
        for number, weight in enumerate(self._weights):
            for _ in range(int(weight)):
                yield from self._half(number, held_out=False)
            size = self._sizes[number] - self._held_out[number]
            if more := round(size * (weight % 1)):
                half = self._half(number, held_out=False)
                yield from _drawn(half, size, more, [self._seed, 1, number])

    def _half(self, number: int, *, held_out: bool) -> Iterator[Columns]:
        """Yields the rows of a source that are held out, or the others."""
        first = sum(len(source.table) for source in self.sources[:number])
        rows, seed = self.sources[number].usable(first), [self._seed, 0, number]
        return _drawn(rows, self._sizes[number], self._held_out[number], seed, drawn=held_out)


def _drawn(
    rows: Iterable[Columns], size: int, count: int, seed: Sequence[int], *, drawn: bool = True
) -> Iterator[Columns]:
    """Draws rows while they pass by in blocks: every choice of so many has the same chance.

    Args:
        rows: The rows, in blocks.
        size: Number of rows.
        count: Number of rows to draw.
        seed: Seed of chance: the same one draws the same rows.
        drawn: Whether the drawn rows are yielded, or the others.
    """
    random = np.random.default_rng(seed)
    for block in rows:
        here = len(block[0])
        num_drawn = int(random.hypergeometric(count, size - count, here))
        chosen = (random.permutation(here) < num_drawn) == drawn
        yield tuple(column[chosen] for column in block)
        size, count = size - here, count - num_drawn


class _Work:
    """Tokenises sources and joins their rows, by one recipe's settings."""

    def __init__(self, data: DataSection, tokenizer: Any, method: str) -> None:
        template = None
        if data.chat_template is not None:
            template = Path(data.chat_template).read_text(encoding="utf-8")
        self._data, self._pairs, self._method = data, method in OF_PAIRS, method
        self._tokenizing = Tokenizing(
            tokenizer, template, loss_on="all" if self._pairs else data.loss_on
        )
        self._vocabulary = len(tokenizer)
        self._key = _hash(
            _LAYOUT, self._pairs, data.loss_on, data.max_length, data.truncation, data.broken_rows,
            template, _identity(tokenizer),
        )  # fmt: skip
        self.cache = cache()

    def open(self, path: str, format_name: str) -> list[_Tokenised]:
        """Opens and tokenises what a recipe names.

        Raises:
            ValueError: The format is none that the method trains on.
        """
        sources = load(path, format_name)
        for source in sources:
            if (source.format_name == "preference") != self._pairs:
                wanted = "pairs (format preference)" if self._pairs else "conversations or texts"
                raise ValueError(
                    f"{source.name} has rows of format {source.format_name}, and method "
                    f"{self._method} trains on {wanted}"
                )
        return [self._tokenised(source) for source in sources]

    def _tokenised(self, source: Source) -> _Tokenised:
        key = _hash(self._key, source.key, source.format_name, Path(source.name).suffix)
        folder = self.cache / key
        folder.mkdir(parents=True, exist_ok=True)
        total = -(-len(source.rows) // ROWS_PER_PART)
        to_columns, features = self._of_tokens, {**_OF_TOKENS, **_STATISTICS}
        if self._pairs:
            as_text = self._are_texts(source)
            to_columns = functools.partial(self._of_pairs, as_text=as_text)
            form = _TEXT if as_text else datasets.List({"role": _TEXT, "content": _TEXT})
            features = {**dict.fromkeys(_PARTS, form), **_STATISTICS}
        tables = list[datasets.Dataset]()
        for number in range(total):
            first = number * ROWS_PER_PART
            rows = source.rows.select(range(first, min(first + ROWS_PER_PART, len(source.rows))))

            def encode(
                batch: dict[str, list[Any]], indices: list[int], first: int = first
            ) -> dict[str, Any] | pa.Table:
                return to_columns(source, source.read(batch, first + indices[0]))

            part_of = f" ({number + 1} of {total})" if total > 1 else ""
            tables.append(
                rows.map(
                    encode,
                    batched=True,
                    with_indices=True,
                    batch_size=_ROWS_PER_BATCH,
                    writer_batch_size=_ROWS_PER_BATCH,
                    remove_columns=rows.column_names,
                    features=datasets.Features(features),
                    cache_file_name=str(folder / f"{number:05d}.arrow"),
                    load_from_cache_file=True,
                    new_fingerprint=f"{key}-{number}",
                    desc=f"tokenise {Path(source.name).name}{part_of}",
                )
            )
        return _Tokenised(source, datasets.concatenate_datasets(tables), key)

    def _of_tokens(self, source: Source, rows: list[tuple[str, Any]]) -> pa.Table:
        """Tokenises a batch of conversations or texts."""
        found: list[Tokens | BrokenRowError | None] = [None] * len(rows)
        texts = list[tuple[str, Spans, bool]]()
        places = list[int]()
        for at, (place, row) in enumerate(rows):
            if source.format_name == "megatron":
                found[at] = self._of_ids(place, row)
            elif row is not None:
                try:
                    if isinstance(row, BrokenRowError):
                        raise row
                    parsed = parse(row, source.format_name)
                    assert not isinstance(parsed, Preference)
                    text, spans = self._tokenizing.characters(parsed)
                except BrokenRowError as error:
                    found[at] = error
                else:
                    texts.append((text, spans, isinstance(parsed, Text)))
                    places.append(at)
        for at, tokens in zip(places, self._tokenizing(texts), strict=True):
            found[at] = tokens
        return self._columns(rows, found)

    def _of_ids(self, place: str, ids: npt.NDArray[Any]) -> Tokens:
        """Takes the token ids of a Megatron-LM file."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
            raise ValueError(
                f"{place} has token ids {ids.min()} to {ids.max()}, and the tokenizer has "
                f"{self._vocabulary}: the file was made with another one"
            )
        return Tokens(ids.tolist(), [(0, len(ids))])

    def _columns(
        self, rows: list[tuple[str, Any]], found: list[Tokens | BrokenRowError | None]
    ) -> pa.Table:
        """Makes the columns of a batch; rows that are left out have no tokens in them."""
        splits = self._data.truncation == "split"
        limit = np.iinfo(np.int32).max if splits else self._data.max_length
        ids, counted_ranges, end = [np.empty(0, np.int32)], list[tuple[int, int]](), 0
        borders, figures, why = [0], list[tuple[int, int, int]](), list[str | None]()
        for (place, _), tokens in zip(rows, found, strict=True):
            why.append(self._left_out(place, tokens))
            if not isinstance(tokens, Tokens):
                figures.append((0, 0, Outcome.BLANK if tokens is None else Outcome.BROKEN))
                borders.append(end)
                continue
            length = len(tokens.ids)
            ranges = [(begin, min(last, limit)) for begin, last in tokens.counted if begin < limit]
            # No model predicts the first token, so that it never counts.
            counted = sum(max(last - max(begin, 1), 0) for begin, last in ranges)
            outcome = self._outcome(place, length)
            if outcome is not Outcome.TOO_LONG and not counted:
                outcome = Outcome.WITHOUT_LOSS
            if outcome <= Outcome.SPLIT:
                ids.append(np.asarray(tokens.ids[:limit], np.int32))
                counted_ranges += [(end + begin, end + last) for begin, last in ranges]
                end += len(ids[-1])
            else:
                counted = 0
            figures.append((length, counted, outcome))
            borders.append(end)
        flat = np.concatenate(ids)
        labels = np.full_like(flat, IGNORED)
        for begin, last in counted_ranges:
            labels[begin:last] = flat[begin:last]
        columns = zip(_FIGURES, np.asarray(figures, np.int32).T, strict=True)
        return pa.table(
            {"input_ids": _lists(borders, flat), "labels": _lists(borders, labels)}
            | {name: pa.array(column) for name, column in columns}
            | {"why": pa.array(why, pa.string())}
        )

    def _outcome(self, place: str, length: int) -> Outcome:
        limit, truncation = self._data.max_length, self._data.truncation
        if length <= limit:
            return Outcome.KEPT
        if truncation == "split":
            return Outcome.SPLIT
        if truncation == "refuse":
            raise ValueError(
                f"{place} has {length} tokens, and data.max_length is {limit}; raise it, or take "
                "truncation: right or drop"
            )
        return Outcome.TRUNCATED if truncation == "right" else Outcome.TOO_LONG

    def _left_out(self, place: str, found: object) -> str | None:
        """Returns why a row is broken; None: it is not.

        Raises:
            ValueError: It is, and broken rows are refused.
        """
        if not isinstance(found, BrokenRowError):
            return None
        if self._data.broken_rows == "refuse":
            raise ValueError(
                f"{place}: {str(found).rstrip('.')}. Correct the row, or leave out such rows: "
                "broken_rows: skip"
            ) from found
        return str(found)

    def _are_texts(self, source: Source) -> bool:
        """Whether prompts and answers are texts, not messages, as in the first pair that is one."""
        for begin in range(0, len(source.rows), 100):
            for _, row in source.read(source.rows[begin : begin + 100], begin):
                try:
                    pair = parse(row, source.format_name)
                except BrokenRowError:
                    continue
                return isinstance(pair, Preference) and isinstance(pair.chosen, str)
        return True

    def _of_pairs(
        self, source: Source, rows: list[tuple[str, Any]], as_text: bool
    ) -> dict[str, Any]:
        """Checks and measures a batch of pairs, which the trainer tokenises itself."""
        columns: dict[str, list[Any]] = {name: [] for name in (*_PARTS, *_STATISTICS)}
        for place, row in rows:
            outcome, length = Outcome.BLANK if row is None else Outcome.BROKEN, 0
            why: str | None = None
            parts: Sequence[Any] = ("", "", "") if as_text else ([], [], [])
            try:
                if isinstance(row, BrokenRowError):
                    raise row
                if row is not None:
                    pair = parse(row, source.format_name)
                    assert isinstance(pair, Preference)
                    length, of_prompt = self._lengths_of_pair(pair, as_text)
                    outcome = self._outcome(place, length)
                    if outcome is Outcome.TRUNCATED and of_prompt >= self._data.max_length:
                        outcome = Outcome.WITHOUT_LOSS
                    if outcome <= Outcome.TRUNCATED:
                        parts = (pair.prompt, pair.chosen, pair.rejected)
            except BrokenRowError as error:
                why = self._left_out(place, error)
            values = (*parts, length, 0, int(outcome), why)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        return columns

    def _lengths_of_pair(self, pair: Preference, as_text: bool) -> tuple[int, int]:
        """Returns the tokens of the longer answer with its prompt, and those of the prompt."""
        prompt, *answers = (
            _part(part, as_text) for part in (pair.prompt, pair.chosen, pair.rejected)
        )
        render: Any = str if as_text else self._tokenizing.template.render
        texts = [render(prompt + answer) for answer in answers]
        texts.append(prompt if as_text else render(prompt, generation_prompt=True))
        done = self._tokenizing([(text, [(0, len(text))], as_text) for text in texts])
        *whole, of_prompt = [len(tokens.ids) for tokens in done if isinstance(tokens, Tokens)]
        return max(whole), of_prompt

    def joined(self, mixture: _Mixture, half: Literal["train", "held-out"]) -> _Joined | None:
        """Joins the chosen rows of all sources, packed where the recipe says so; None: no rows."""
        chosen = mixture.train() if half == "train" else mixture.held_out()
        key = _hash(mixture.key, half)
        places = stored(key, ("indices", "length", "counted"), chosen)
        if not len(places):
            return None
        table = datasets.concatenate_datasets([source.table for source in mixture.sources])
        if half != "train" or not mixture.is_all:
            # Dataset.select makes a list of Python's numbers of the indices.
            indices = places.data.select(["indices"])
            table = datasets.Dataset(
                table.data, info=table.info.copy(), indices_table=indices, fingerprint=key
            )
        table = table.select_columns(list(_PARTS if self._pairs else _OF_TOKENS))
        limit, splits = self._data.max_length, self._data.truncation == "split"
        num_tokens = num_counted = num_further = 0
        for _, lengths, counted in _blocks(places):
            # All pieces of a document but the first repeat a token.
            further = int(((lengths - 2) // (limit - 1)).sum()) if splits else 0
            num_further += further
            num_tokens += further + int((lengths if splits else np.minimum(lengths, limit)).sum())
            num_counted += int(counted.sum())
        (self.cache / key).mkdir(parents=True, exist_ok=True)

        def kept_as(step: str) -> dict[str, Any]:
            return {
                "cache_file_name": str(self.cache / key / f"{step}.arrow"),
                "load_from_cache_file": True,
                "new_fingerprint": f"{key}-{step}",
                "desc": f"{step} rows ({half})",
            }

        if num_further:
            table = table.with_format("numpy").map(
                functools.partial(_pieces, capacity=limit),
                batched=True,
                batch_size=_ROWS_PER_BATCH // 10,
                features=datasets.Features(_OF_TOKENS),
                **kept_as("split"),
            )
            table = table.with_format(None)
        if not self._data.packing or self._pairs:
            return _Joined(table, num_tokens, num_counted, None)
        from trl import pack_dataset

        batch_size = max(len(table) * _PACKED_TOKENS // num_tokens, 1)
        table = pack_dataset(table, limit, map_kwargs={"batch_size": batch_size, **kept_as("pack")})
        return _Joined(table, num_tokens, num_counted, num_tokens / (len(table) * limit))


def _pieces(batch: dict[str, Any], capacity: int) -> dict[str, list[Any]]:
    """Splits documents that are longer than a sequence.

    A piece begins with the last token of the piece before it, which no loss counts there: every
    token but a document's first is predicted once, as from the stream of Megatron-LM's GPTDataset.

    Args:
        batch: Columns of arrays, one for each document.
        capacity: Tokens that a sequence holds, at least 2.
    """
    return {
        name: [
            document[begin : begin + capacity]
            for document in documents
            for begin in range(0, max(len(document) - 1, 1), capacity - 1)
        ]
        for name, documents in batch.items()
    }


def _lists(borders: npt.ArrayLike, flat: npt.NDArray[Any]) -> pa.ListArray:
    """Makes a column of lists that follow each other in one array."""
    return pa.ListArray.from_arrays(np.asarray(borders, np.int32), pa.array(flat))


def _part(part: str | list[Message], as_text: bool) -> Any:
    """Returns a part of a pair.

    Raises:
        BrokenRowError: It is of another form than the first row's, or a turn has more fields.
    """
    if isinstance(part, str) != as_text:
        raise BrokenRowError("its prompt and answers are of another form than the first row's")
    for turn in part if not as_text else []:
        if isinstance(turn, dict) and len(turn) > 2:
            more = ", ".join(sorted(set(turn) - {"role", "content"}))
            raise BrokenRowError(f"a turn has {more}; pairs hold role and content alone")
    return part


def _hash(*values: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


def _identity(tokenizer: Any) -> list[Any]:
    """Returns all that decides which ids conversations become, and how rows are packed."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return [
        type(tokenizer).__name__, words, tokenizer.special_tokens_map, tokenizer.chat_template,
        *map(version, _PACKAGES),
    ]  # fmt: skip
