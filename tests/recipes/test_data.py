"""Data of recipes: formats, sources, and the data sets that a trainer gets."""

import errno
import itertools
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from rich.console import Console

from castor.errors import UsageError
from castor.recipes.data import megatron
from castor.recipes.data import prepare as preparing
from castor.recipes.data.formats import (
    BrokenRowError,
    Conversation,
    Preference,
    Text,
    detect,
    parse,
)
from castor.recipes.data.prepare import Outcome, prepare
from castor.recipes.data.show import COUNTED, coloured, print_rows
from castor.recipes.data.sources import load
from castor.recipes.recipe import DataSection, MethodSection, ModelSection, OutputSection, Recipe
from chat_cases import CHATML, by_chatml, conversation, mask_by_hand, text, tokenizer

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
WRONG = {"role": "assistant", "content": "b"}


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def chats(path: Path, count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    choice = random.Random(seed)
    rows = [conversation(choice) for _ in range(count)]
    written(path, [{"messages": row} for row in rows])
    return rows


def documents(table: datasets.Dataset) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Token ids and labels of each document, of packed rows or not."""
    found = []
    for row in table:
        count = len(row["input_ids"])
        ends = list(itertools.accumulate(row.get("seq_lengths", [count])))
        assert ends[-1] == count == len(row["labels"])
        for begin, end in itertools.pairwise([0, *ends]):
            found.append((tuple(row["input_ids"][begin:end]), tuple(row["labels"][begin:end])))
    return found


@pytest.mark.parametrize(
    ("row", "name", "found"),
    [
        ({"messages": [QUESTION, ANSWER]}, "messages", Conversation([QUESTION, ANSWER])),
        (
            {"messages": [QUESTION, ANSWER], "tools": '[{"name": "f"}]'},
            "messages",
            Conversation([QUESTION, ANSWER], tools=[{"name": "f"}]),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
            "messages",
            Conversation([QUESTION, ANSWER]),
        ),
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "system": "s",
            },
            "sharegpt",
            Conversation([{"role": "system", "content": "s"}, QUESTION, ANSWER]),
        ),
        (
            {"instruction": "q", "input": "", "output": "a"},
            "alpaca",
            Conversation([QUESTION, ANSWER]),
        ),
        (
            {"instruction": "q", "input": "x", "output": "a", "history": [["q", "b"]]},
            "alpaca",
            Conversation([QUESTION, WRONG, {"role": "user", "content": "q\n\nx"}, ANSWER]),
        ),
        ({"prompt": "q", "completion": "a"}, "prompt_completion", Text("qa", 1)),
        (
            {"prompt": [QUESTION], "completion": [ANSWER]},
            "prompt_completion",
            Conversation([QUESTION, ANSWER], 1),
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", Preference("q", "a", "b")),
        ({"chosen": "q a", "rejected": "q b"}, "preference", Preference("q ", "a", "b")),
        (
            {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG]},
            "preference",
            Preference([QUESTION], [ANSWER], [WRONG]),
        ),
        (
            {"prompt": "q", "chosen": [ANSWER], "rejected": [WRONG]},
            "preference",
            Preference([QUESTION], [ANSWER], [WRONG]),
        ),
        ({"text": "a", "id": 3}, "text", Text("a")),
    ],
)  # fmt: skip
def test_rows_of_every_format(row: dict[str, Any], name: str, found: object) -> None:
    assert detect(list(row)) == name
    assert parse(row, name) == found


@pytest.mark.parametrize(
    ("row", "name", "said"),
    [
        ({"messages": []}, "messages", "'messages' is empty"),
        ({"messages": [QUESTION]}, "messages", "no turn of the assistant to learn from"),
        (
            {"messages": [{"role": "user", "content": "q\ud800"}, ANSWER]},
            "messages",
            r"turn 1 of 'messages' has the half of a character, '\\ud800', at character 2",
        ),
        ({"text": "\udfff"}, "text", "'text' has the half of a character"),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": " "}]},
            "messages",
            "turn 2 of 'messages' is an empty turn of the assistant",
        ),
        (
            {"messages": [{"role": "asistant", "content": "a"}]},
            "messages",
            "has the role 'asistant', which is none: did you mean 'assistant'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
            "messages",
            "turn 1 of 'messages' holds a part of type 'image'",
        ),
        (
            {"messages": [QUESTION, {**ANSWER, "weight": 2}]},
            "messages",
            "turn 2 of 'messages' has the weight 2, which is not 0 or 1",
        ),
        ({"messages": [QUESTION, ANSWER], "tools": "f"}, "messages", "a text that is no JSON"),
        ({"messages": [QUESTION, ANSWER], "tools": ["f"]}, "messages", "is no list of functions"),
        ({"text": "a"}, "messages", "needs 'messages'; the row has text"),
        ([1], "text", "the row is list, not an object"),
        ({"text": " "}, "text", "'text' is empty"),
        ({"prompt": "a", "completion": ""}, "prompt_completion", "'completion' is empty"),
        ({"prompt": 3, "completion": "a"}, "prompt_completion", "'prompt' is int, not text"),
        ({"chosen": "a", "rejected": "a"}, "preference", "are lacking or the same"),
        ({"chosen": "a", "rejected": "b"}, "preference", "share no beginning"),
        (
            {"instruction": "q", "output": "a", "history": [["q"]]},
            "alpaca",
            "'history' is no list of pairs",
        ),
    ],
)  # fmt: skip
def test_broken_rows_say_why(row: object, name: str, said: str) -> None:
    with pytest.raises(BrokenRowError, match=said):
        parse(row, name)


def test_keys_of_no_format_get_the_nearest_one() -> None:
    with pytest.raises(BrokenRowError, match=r"\(mesages\) .* no format: did you mean 'messages'"):
        detect(["mesages"])


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [{"text": one} for one in ("one", 'two, "quoted"', "drei\u2028ä", "vier")]
    table = datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows), fingerprint="rows")
    written(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    (tmp_path / "c.txt").write_text("\n".join(row["text"] for row in rows), encoding="utf-8")
    (tmp_path / "d.jsonl").write_bytes(
        b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, rows)).encode()
    )
    table.to_csv(str(tmp_path / "e.csv"))
    table.to_parquet(str(tmp_path / "f.parquet"))
    table.save_to_disk(str(tmp_path / "g"))
    names = ["a.jsonl", "b.json", "c.txt", "d.jsonl", "e.csv", "f.parquet", "g"]
    for name in names:
        (source,) = load(str(tmp_path / name))
        assert source.format_name == "text"
        read = source.read(source.rows[:], 0)
        assert [row for _, row in read if row is not None] == rows, name
        assert all(place.startswith(str(tmp_path / name)) for place, _ in read)
    (tmp_path / "h").mkdir()
    for name in names[:3]:
        (tmp_path / name).rename(tmp_path / "h" / name)
    assert [Path(one.name).name for one in load(str(tmp_path / "h"))] == names[:3]


def test_cells_of_csv_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffinstruction,input,output\n1,,None\n"a ""b"",\nc",2.50,007\n', "utf-8")
    (source,) = load(str(path))
    assert [row for _, row in source.read(source.rows[:], 0)] == [
        {"instruction": "1", "input": "", "output": "None"},
        {"instruction": 'a "b",\nc', "input": "2.50", "output": "007"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", '[{"text": "a"},\n{"text": "b"', r"a\.json, line 2: the file is no JSON"),
        ("a.json", '[{"text": "a"}]\nx', r"a\.json, line 2: 'x' follows the end of the array"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", '\n{"mesages": 1}', r"a\.jsonl, line 2: the keys \(mesages\)"),
        ("a.jsonl", "[1]\n[2]", r"with keys; .*line 1: the row is list, .* array ends in \.json\)"),
        ("a.jsonl", "\n\0\1", r"with keys; .*a\.jsonl, line 2: the row is no JSON"),
        ("a.jsonl", "null", r"with keys; .*a\.jsonl, line 1: the row is null"),
        ("a.jsonl", '\ufeff{"text": "a"}'.encode("utf-16-le"), "is in UTF-16; save it in UTF-8"),
        ("a.csv", "text,text\n1,2", r"a\.csv cannot be read as csv: a name is twice in its first"),
        ("a.doc", "x", r"a\.doc is of no known kind; rows are read from \.jsonl"),
        ("a.parquet", "x", r"a\.parquet cannot be read as parquet"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=said):
        load(str(tmp_path / name))


def test_an_array_is_read_row_by_row_and_names_the_line_of_a_broken_one(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"text": 'brackets ]}[{, "quotes" and a backslash \\'},
        {"text": "nested", "more": [[1, {"a": []}], {}]},
        {"text": "letters: \u00e4 \U0001f600"},
    ]
    path = tmp_path / "a.json"
    for indent, ascii_alone in ((None, True), (None, False), (2, False)):
        path.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii_alone), "utf-8")
        (source,) = load(str(path))
        assert [row for _, row in source.read(source.rows[:], 0)] == rows
    (source,) = load(str(path))
    assert [place.rpartition(", ")[2] for place, _ in source.read(source.rows[:], 0)] == [
        "line 2", "line 5", "line 17",
    ]  # fmt: skip
    path.write_text('[{"text": "a"},\n\n {"text":\n "b"; },\n{"text": "c"}]\n')
    data = DataSection(train=str(path), held_out=0, broken_rows="skip")
    found = prepare(data, tokenizer(), method="pretrain")
    assert found.outcomes == {Outcome.KEPT: 2, Outcome.BROKEN: 1}
    assert found.broken == (
        f"{path}, line 3: the row is no JSON: Expecting ',' delimiter at character 5 of its line 2",
    )


def test_names_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*lost\.jsonl"):
        load(str(tmp_path / "lost.jsonl"))
    with pytest.raises(ValueError, match=r"neither the hub nor the cache \(.*\) gives"):
        load("castor-nobody/nothing")
    with pytest.raises(ValueError, match="did you mean 'sharegpt'"):
        load(str(tmp_path), "shargpt")


def test_conversations_become_the_rows_by_hand(tmp_path: Path) -> None:
    words = tokenizer(CHATML)
    rows = chats(tmp_path / "chats.jsonl", 60)
    data = DataSection(
        train=str(tmp_path / "chats.jsonl"), held_out=0, packing=False, max_length=100
    )
    found = prepare(data, words, method="sft")
    by_hand = [mask_by_hand(words, by_chatml(row)) for row in rows]
    cut = [(tuple(ids[:100]), tuple(labels[:100])) for ids, labels in by_hand]
    kept = [(ids, labels) for ids, labels in cut if any(label != -100 for label in labels)]
    assert documents(found.train) == kept
    assert found.train.column_names == ["input_ids", "labels"]
    assert found.held_out is None
    assert found.density is None
    assert found.lengths == Counter(len(ids) for ids, _ in by_hand)
    assert found.num_tokens == sum(len(ids) for ids, _ in kept)
    assert found.num_counted == sum(one != -100 for _, labels in kept for one in labels)
    truncated = sum(len(ids) > 100 for ids, _ in by_hand) - (len(cut) - len(kept))
    counts = {Outcome.TRUNCATED: truncated, Outcome.WITHOUT_LOSS: len(cut) - len(kept)}
    counts[Outcome.KEPT] = 60 - sum(counts.values())
    assert found.outcomes == Counter({key: count for key, count in counts.items() if count})


@pytest.mark.parametrize(("loss_on", "at_once"), [("assistant", 1 << 20), ("all", 8000)])
def test_packed_rows_hold_every_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_on: Any, at_once: int
) -> None:
    monkeypatch.setattr(preparing, "_PACKED_TOKENS", at_once)
    words = tokenizer(CHATML)
    chats(tmp_path / "chats.jsonl", 250)
    path = str(tmp_path / "chats.jsonl")
    data = DataSection(train=path, held_out=20, max_length=160, loss_on=loss_on)
    packed = prepare(data, words, method="sft")
    plain = prepare(data.model_copy(update={"packing": False}), words, method="sft")
    for one, other in ((packed.train, plain.train), (packed.held_out, plain.held_out)):
        assert one is not None
        assert other is not None
        assert one.column_names == ["input_ids", "labels", "seq_lengths"]
        assert Counter(documents(one)) == Counter(documents(other))
        assert max(map(len, one["input_ids"])) <= 160
    assert packed.density == packed.num_tokens / (len(packed.train) * 160)
    assert packed.density > 0.9
    assert len(documents(packed.held_out)) == 20


def test_the_same_settings_give_the_same_rows_and_another_seed_others(tmp_path: Path) -> None:
    words = tokenizer(CHATML)
    chats(tmp_path / "chats.jsonl", 80)
    data = DataSection(train=str(tmp_path / "chats.jsonl"), held_out=0.1, max_length=256)
    one, same = (prepare(data, words, method="sft") for _ in range(2))
    other = prepare(data.model_copy(update={"seed": 1}), words, method="sft")
    assert one.train[:] == same.train[:]
    assert one.held_out[:] == same.held_out[:]
    assert one.held_out[:] != other.held_out[:]
    assert not set(documents(one.train)) & {
        (ids, labels) for ids, labels in documents(one.held_out)
    }


def test_rows_are_tokenised_once_and_a_stopped_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "ROWS_PER_PART", 30)
    words, calls, stopping = tokenizer(CHATML), list[int](), [True]
    chats(tmp_path / "chats.jsonl", 100, seed=5)
    data = DataSection(train=str(tmp_path / "chats.jsonl"), held_out=0)
    encode = preparing._Work._of_tokens

    def stops(work: Any, source: Any, rows: Any) -> Any:
        if stopping and len(calls) == 2:
            stopping.clear()
            calls.clear()
            raise KeyboardInterrupt
        calls.append(len(rows))
        return encode(work, source, rows)

    monkeypatch.setattr(preparing._Work, "_of_tokens", stops)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, words, method="sft")
    found = prepare(data, words, method="sft")
    assert calls == [30, 10]
    calls.clear()
    again = prepare(data, words, method="sft")
    assert calls == []
    assert found.train[:] == again.train[:]
    files = [path.name for path in found.cache.rglob("*") if path.is_file()]
    assert all(name.endswith(".arrow") and not name.startswith("tmp") for name in files)
    # Another setting is other rows.
    prepare(data.model_copy(update={"max_length": 99}), words, method="sft")
    assert calls == [30, 30, 30, 10]
    calls.clear()
    # So is another version of what renders and packs them.
    versions = preparing.version
    monkeypatch.setattr(
        preparing, "version", lambda name: "1.0" if name == "trl" else versions(name)
    )
    prepare(data, words, method="sft")
    assert calls == [30, 30, 30, 10]


def test_broken_rows_are_refused_or_counted_with_file_and_line(tmp_path: Path) -> None:
    words, path = tokenizer(CHATML), tmp_path / "chats.jsonl"
    good = json.dumps({"messages": [QUESTION, ANSWER]})
    path.write_text(f'{good}\n\n{{"messages": [\n \n{good}\n{{"text": "a"}}\n')
    data = DataSection(train=str(path), held_out=0)
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 3: the row is no JSON: Expecting"):
        prepare(data, words, method="sft")
    found = prepare(data.model_copy(update={"broken_rows": "skip"}), words, method="sft")
    assert found.outcomes == {Outcome.KEPT: 2, Outcome.BROKEN: 2, Outcome.BLANK: 1}
    assert [line.split("chats.jsonl, ")[1][:6] for line in found.broken] == ["line 3", "line 6"]
    assert "needs 'messages'; the row has text" in found.broken[1]


def test_long_rows_are_cut_left_out_or_refused(tmp_path: Path) -> None:
    words = tokenizer()
    path = written(tmp_path / "texts.jsonl", [{"text": "a"}, {"text": "a b " * 50}])
    data = DataSection(train=path, held_out=0, max_length=20, packing=False)
    found = prepare(data, words, method="sft")
    assert list(map(len, found.train["input_ids"])) == [2, 20]
    assert found.outcomes == {Outcome.KEPT: 1, Outcome.TRUNCATED: 1}
    found = prepare(data.model_copy(update={"truncation": "drop"}), words, method="sft")
    assert list(map(len, found.train["input_ids"])) == [2]
    assert found.outcomes == {Outcome.KEPT: 1, Outcome.TOO_LONG: 1}
    with pytest.raises(ValueError, match=r"line 2 has \d+ tokens, and data\.max_length is 20"):
        prepare(data.model_copy(update={"truncation": "refuse"}), words, method="sft")


def test_a_full_disk_is_named_and_leaves_no_half_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(preparing, "ROWS_PER_PART", 100)
    path = written(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(250)])
    data = DataSection(train=path, held_out=0, max_length=16, packing=False, loss_on="all")
    write = datasets.arrow_writer.ArrowWriter.write_table
    parts = iter(range(3))

    def filling(self: Any, *given: Any, **more: Any) -> None:
        write(self, *given, **more)
        if next(parts) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(datasets.arrow_writer.ArrowWriter, "write_table", filling)
    with pytest.raises(UsageError, match="has no room for the tokenised rows; make some, or name"):
        prepare(data, tokenizer(), method="pretrain")
    left = [one for one in (tmp_path / "cache").rglob("*") if one.is_file()]
    assert [one.name for one in left if one.parent.name != "places"] == ["00000.arrow"]


@pytest.mark.parametrize("packing", [True, False])
def test_long_documents_become_several_sequences_that_predict_each_token_once(
    tmp_path: Path, packing: bool
) -> None:
    words, limit = tokenizer(), 16
    choice = random.Random(3)
    texts = ["a", text(choice, 500), "b c", text(choice, 2000), text(choice, 900)]
    path = written(tmp_path / "a.jsonl", [{"text": one} for one in texts])
    ids = [[*words(one)["input_ids"], words.eos_token_id] for one in texts]
    assert sum(len(one) > 3 * limit for one in ids) == 3
    data = DataSection(
        train=path, held_out=0, max_length=limit, packing=packing, loss_on="all",
        truncation="split",
    )  # fmt: skip
    found = prepare(data, words, method="pretrain")
    assert found.outcomes == {Outcome.KEPT: 2, Outcome.SPLIT: 3}
    pieces = documents(found.train)
    assert max(len(piece) for piece, _ in pieces) == limit
    assert found.num_tokens == sum(len(piece) for piece, _ in pieces)
    predicted = Counter(pair for piece, _ in pieces for pair in itertools.pairwise(piece))
    assert predicted == Counter(pair for one in ids for pair in itertools.pairwise(one))
    assert found.num_counted == sum(len(one) - 1 for one in ids)
    assert all(labels[1:] == piece[1:] for piece, labels in pieces)
    if not packing:  # pieces follow each other as they do in their documents
        joined = [token for piece, _ in pieces for token in piece]
        assert joined[:limit] == [*ids[0], *ids[1]][:limit]


def test_sources_are_mixed_by_weight_after_rows_are_held_out(tmp_path: Path) -> None:
    words = tokenizer()
    one = written(tmp_path / "one.jsonl", [{"text": f"one {i}"} for i in range(20)])
    other = written(tmp_path / "two.jsonl", [{"text": f"two {i}"} for i in range(20)])
    sources = [{"path": one, "weight": 2.5}, {"path": other, "weight": 0.5, "format": "text"}]
    data = DataSection.model_validate({"train": sources, "held_out": 10, "packing": False})
    found = prepare(data, words, method="pretrain")
    texts = Counter(words.decode(ids[:-1]) for ids in found.train["input_ids"])
    held = {words.decode(ids[:-1]) for ids in found.held_out["input_ids"]}
    assert len(held) == 10
    assert not held & set(texts)
    ones = [text for text in held if text.startswith("one")]
    assert sum(n for name, n in texts.items() if "one" in name) == (20 - len(ones)) * 5 // 2
    assert sum(n for name, n in texts.items() if "two" in name) == round((10 + len(ones)) / 2)
    assert {n for name, n in texts.items() if "one" in name} <= {2, 3}


def test_every_row_has_the_same_chance_to_be_held_out() -> None:
    sizes, count = (7, 1, 12, 0, 10), 9
    times = np.zeros(sum(sizes), int)
    for seed in range(2000):
        ends = np.cumsum(sizes)
        blocks = [(np.arange(end - size, end),) for size, end in zip(sizes, ends, strict=True)]
        halves = [
            np.concatenate([rows for (rows,) in half]).tolist()
            for half in (
                preparing._drawn(blocks, sum(sizes), count, [seed], drawn=drawn)
                for drawn in (True, False)
            )
        ]
        assert len(halves[0]) == count
        assert sorted(halves[0] + halves[1]) == list(range(sum(sizes)))
        times[halves[0]] += 1
    # 600 times each, with a standard deviation of 20.5.
    assert times.min() > 500
    assert times.max() < 700


def test_the_figures_of_a_mixture_are_those_of_its_rows(tmp_path: Path) -> None:
    words = tokenizer()
    one = written(tmp_path / "one.jsonl", [{"text": "a b " * i} for i in range(1, 30)])
    other = written(tmp_path / "two.jsonl", [{"text": "c d " * i} for i in range(1, 30)])
    data = DataSection.model_validate(
        {
            "train": [{"path": one, "weight": 2.5}, {"path": other}],
            "held_out": 7, "packing": False, "max_length": 16, "loss_on": "all",
        }
    )  # fmt: skip
    for truncation in ("right", "split"):
        found = prepare(
            data.model_copy(update={"truncation": truncation}), words, method="pretrain"
        )
        assert found.num_tokens == sum(map(len, found.train["input_ids"]))
        counted = sum(label != -100 for row in found.train["labels"] for label in row[1:])
        assert found.num_counted == counted


def test_rows_to_evaluate_on_may_have_a_file_of_their_own(tmp_path: Path) -> None:
    one = written(tmp_path / "one.jsonl", [{"text": "one"}] * 3)
    other = written(tmp_path / "two.jsonl", [{"text": "two"}] * 2)
    data = DataSection(train=one, held_out=other, packing=False)
    found = prepare(data, tokenizer(), method="pretrain")
    assert (len(found.train), len(found.held_out)) == (3, 2)
    assert found.outcomes == {Outcome.KEPT: 5}


def test_more_rows_held_out_than_there_are(tmp_path: Path) -> None:
    path = written(tmp_path / "one.jsonl", [{"text": "one"}] * 3)
    with pytest.raises(ValueError, match="held_out is 3: 3 of 3 rows would leave none"):
        prepare(DataSection(train=path, held_out=3), tokenizer(), method="pretrain")


def test_token_files_of_megatron_are_rows(tmp_path: Path) -> None:
    words = tokenizer()
    given = [[7, 8, 9], [5], [], list(range(4, 40))]
    megatron.write(tmp_path / "tokens", [[one] for one in given], np.uint16)
    data = DataSection(
        train=str(tmp_path / "tokens"), held_out=0, max_length=10, packing=False, loss_on="all"
    )
    found = prepare(data, words, method="pretrain")
    assert found.train["input_ids"][:] == [[7, 8, 9], list(range(4, 14))]
    assert found.train["labels"][:] == found.train["input_ids"][:]
    assert found.outcomes[Outcome.WITHOUT_LOSS] == 2
    megatron.write(tmp_path / "tokens", [[[1, len(words)]]], np.uint16)
    with pytest.raises(ValueError, match=rf"document 0 has token ids 1 to {len(words)}, and the"):
        prepare(data, words, method="pretrain")


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_pairs_stay_texts_or_messages(tmp_path: Path, method: str) -> None:
    words, choice = tokenizer(CHATML), random.Random(0)
    texts = [{"prompt": text(choice), "chosen": "yes", "rejected": "no"} for _ in range(10)]
    data = DataSection(train=written(tmp_path / "a.jsonl", texts), held_out=2, packing=False)
    found = prepare(data, words, method=method)
    assert sorted([*found.train, *found.held_out], key=str) == sorted(texts, key=str)
    turns = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG]}
    rows = [turns, {**texts[0]}, {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WRONG]}]
    data = DataSection(
        train=written(tmp_path / "b.jsonl", rows), held_out=0, packing=False, broken_rows="skip"
    )
    found = prepare(data, words, method=method)
    assert found.train[:] == {
        "prompt": [[QUESTION]] * 2, "chosen": [[ANSWER]] * 2, "rejected": [[WRONG]] * 2
    }  # fmt: skip
    assert found.broken == (
        f"{tmp_path}/b.jsonl, line 2: its prompt and answers are of another form than the first "
        "row's",
    )


def test_pairs_that_trl_would_leave_out_are_counted(tmp_path: Path) -> None:
    words, long = tokenizer(CHATML), "a b " * 20
    rows = [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": long, "rejected": "no"},
        {"prompt": long, "chosen": "yes", "rejected": "no"},
    ]
    data = DataSection(
        train=written(tmp_path / "a.jsonl", rows), held_out=0, max_length=20, packing=False
    )
    found = prepare(data, words, method="dpo")
    assert found.train["prompt"][:] == ["q", "q"]
    assert found.outcomes == {Outcome.KEPT: 1, Outcome.TRUNCATED: 1, Outcome.WITHOUT_LOSS: 1}
    found = prepare(data.model_copy(update={"truncation": "drop"}), words, method="reward")
    assert found.outcomes == {Outcome.KEPT: 1, Outcome.TOO_LONG: 2}


def test_a_method_refuses_rows_of_another(tmp_path: Path) -> None:
    words = tokenizer(CHATML)
    path = written(tmp_path / "a.jsonl", [{"messages": [QUESTION, ANSWER]}])
    with pytest.raises(ValueError, match="rows of format messages, and method dpo trains on pairs"):
        prepare(DataSection(train=path, packing=False), words, method="dpo")
    path = written(tmp_path / "b.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    with pytest.raises(ValueError, match="method sft trains on conversations or texts"):
        prepare(DataSection(train=path), words, method="sft")


def test_a_template_of_a_file_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"messages": [QUESTION, ANSWER]}])
    (tmp_path / "chat.jinja").write_text(CHATML)
    data = DataSection(train=path, held_out=0, chat_template=str(tmp_path / "chat.jinja"))
    words = tokenizer()
    (row,) = prepare(data, words, method="sft").train
    assert words.decode(row["input_ids"]).startswith("<|im_start|>user\nq<|im_end|>")


def test_show_prints_rows_in_colour_and_figures(tmp_path: Path) -> None:
    words = tokenizer(CHATML)
    turns = [QUESTION, {**ANSWER, "content": "naïve 🙂 数据"}]
    path = written(tmp_path / "a.jsonl", [{"messages": turns}] * 3 + [{"messages": []}])
    data = DataSection(train=path, held_out=0, max_length=64, broken_rows="skip")
    found = prepare(data, words, method="sft")
    shown = coloured(found.train[0], words)
    whole = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nnaïve 🙂 数据<|im_end|>\n"
    assert shown.plain.split("\n--- next document ---\n")[0] == whole
    green = [shown.plain[span.start : span.end] for span in shown.spans if span.style == COUNTED]
    assert "".join(green).startswith("naïve 🙂 数据<|im_end|>\n")
    recipe = Recipe(
        model=ModelSection(path="model"),
        data=data,
        method=MethodSection(name="sft"),
        output=OutputSection(dir="run"),
    )
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    print_rows(found, words, console, recipe, num_rows=1)
    console.file.close()
    printed = (tmp_path / "out").read_text()
    assert "naïve 🙂 数据" in printed
    assert "rows: 4 read; " in printed
    assert "left out: 1 broken, 0 longer than 64 tokens" in printed
    assert "a.jsonl, line 4: 'messages' is empty" in printed
    assert f"{found.density:.1%} full" in printed
    with pytest.raises(ValueError, match=r"data\.held_out is 0"):
        print_rows(found, words, console, recipe, num_rows=1, held_out=True)
