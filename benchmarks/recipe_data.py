# Question: what does castor's preparation of a recipe's rows cost in time, and does its memory stay
#     flat as the rows grow?
# Baseline: datasets.load_dataset("json") and one datasets.map that renders the same chat template
#     and tokenises with the same tokenizer. It checks no row, masks none, holds none out and packs
#     none.
# Work: conversations of two turns in JSON Lines for method sft with a fiftieth held out, or texts
#     for method pretrain; besides, packed into rows of 1,024 tokens.
# Memory: the highest anonymous memory of a contender above that before it, each in a process of
#     its own with a cache of its own, and what is left at the end; mapped files count for nothing.
#     The token ids of castor are compared with the baseline's.
"""Time and memory of tokenising: `python benchmarks/recipe_data.py [--rows N] [--quick]`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _machine import command_line, describe_machine, write_record
from _memory import PeakWatch, anonymous_bytes

MAP, CASTOR, PACKED = "datasets.map", "castor", "castor, packed"
SHARES = (10, 1)
"""Sizes that are compared: a tenth of the rows, and all."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prepare(folder: Path, rows: int, kind: str) -> None:
    """Writes a tokenizer, and files with a tenth of the rows and with all."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    words = " ".join(page.read_text(encoding="utf-8") for page in pages).split()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["</s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator([" ".join(words)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    for share in SHARES:
        choice = random.Random(0)
        with (folder / f"{share}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(rows // share):
                begin, count = choice.randrange(len(words)), choice.randrange(4, 30)
                text = words[begin : begin + count]
                turns = [
                    {"role": "user", "content": " ".join(text[:2])},
                    {"role": "assistant", "content": " ".join(text[2:])},
                ]
                row = {"text": " ".join(text)} if kind == "text" else {"messages": turns}
                file.write(json.dumps(row) + "\n")


def contend(contender: str, folder: Path, share: int, kind: str) -> None:
    """Runs one contender in this process, and prints its figures as JSON."""
    import datasets
    import trl.data_utils  # noqa: F401  # imported with the Trainers in any case: no part of the work
    from transformers import AutoTokenizer

    import castor.recipes.data.prepare as preparing
    from castor.recipes.recipe import DataSection

    datasets.disable_progress_bars()
    words: Any = AutoTokenizer.from_pretrained(folder)
    path = str(folder / f"{share}.jsonl")
    before, begin, used = anonymous_bytes(), time.perf_counter(), time.process_time()
    watch = PeakWatch()
    if contender == MAP:
        end = words.eos_token_id

        def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
            if kind == "text":
                ids = words(batch["text"], return_attention_mask=False)["input_ids"]
                ids = [[*one, end] for one in ids]
            else:
                texts = words.apply_chat_template(batch["messages"], tokenize=False)
                ids = words(texts, return_attention_mask=False)["input_ids"]
            return {"input_ids": ids, "labels": ids}

        rows = datasets.load_dataset("json", data_files=path, split="train")
        made: list[Any] = [rows.map(encode, batched=True, remove_columns=rows.column_names)]
    else:
        settings = {"max_length": 1024, "packing": contender == PACKED}
        if kind == "text":
            data = DataSection(train=path, held_out=0, loss_on="all", **settings)
            found = preparing.prepare(data, words, method="pretrain")
        else:
            found = preparing.prepare(DataSection(train=path, **settings), words, method="sft")
        made = [found.train, *([] if found.held_out is None else [found.held_out])]
    seconds, cpu = time.perf_counter() - begin, time.process_time() - used
    peak, left = watch.stop() - before, anonymous_bytes() - before
    tokens, seen = 0, list[list[int]]()
    for table in made:
        for batch in table.with_format("arrow").iter(1000):
            ids = batch.column("input_ids").combine_chunks()
            tokens += len(ids.flatten())
            if len(seen) < 100:
                seen += ids[:100].to_pylist()
    figures = {"peak": peak, "left": left, "s": seconds, "cpu": cpu, "tokens": tokens}
    print(json.dumps({**figures, "first": seen[:100]}))


def main() -> None:
    parser = command_line("recipe_data", __doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=("messages", "text"), default="messages")
    parser.add_argument("--contend", nargs=3, help="a contender, a folder and a share of the rows")
    arguments = parser.parse_args()
    if arguments.contend is not None:
        contender, folder, share = arguments.contend
        contend(contender, Path(folder), int(share), arguments.kind)
        return
    machine = describe_machine()
    rows = 8_000 if arguments.quick else arguments.rows
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        prepare(Path(temporary), rows, arguments.kind)
        for contender in (MAP, CASTOR, PACKED):
            for share in SHARES:
                cache = Path(temporary, f"cache-{contender}-{share}")
                done = subprocess.run(
                    [sys.executable, __file__, "--kind", arguments.kind,
                     "--contend", contender, temporary, str(share)],
                    capture_output=True, text=True, check=False,
                    env={**os.environ, "HF_DATASETS_CACHE": str(cache)},
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
                found[f"{contender}, {rows // share:,} rows"] = json.loads(done.stdout)
    for share in SHARES:
        plain, own, packed = (
            found[f"{one}, {rows // share:,} rows"] for one in (MAP, CASTOR, PACKED)
        )
        assert plain["tokens"] == own["tokens"] == packed["tokens"]
        # Rows that are held out are lacking in castor's.
        there = iter(plain["first"])
        assert all(row in there for row in own["first"][:90])
    for name, figures in found.items():
        del figures["first"]
        print(
            f"{name}: {figures['tokens']:,} tokens, {figures['cpu']:.1f} CPU seconds "
            f"({figures['s']:.1f} s), {figures['peak'] / 2**20:.0f} MiB above the start, "
            f"{figures['left'] / 2**20:.0f} MiB at the end"
        )
    write_record(
        arguments,
        "recipe_data",
        {"rows": rows, "kind": arguments.kind, "contenders": found},
        machine=machine,
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
