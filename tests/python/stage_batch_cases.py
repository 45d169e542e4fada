"""Batches of every form through stages: `python stage_batch_cases.py NAME DIRECTORY`.

As in pipeline_cases.py, whose models these are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

import as_rank
from pipeline_cases import DEEP, MICROBATCHES, ZERO_BUBBLE, boost
from tensor_cases import LR, accumulated, write
from zoo import LENGTH, Batch, Case

ROWS = 2 * MICROBATCHES
STEPS = 3


def labelled_unevenly(seed: int) -> Batch:
    """Rows of which each has fewer labels than the one before, and how many there are in all."""
    ids = torch.cat([DEEP["llama"].batch(seed * ROWS + i)["input_ids"] for i in range(ROWS)])[:ROWS]
    labels = ids.clone()
    for row, some in enumerate(labels):
        some[LENGTH - 2 * row :] = -100
    count = (labels[:, 1:] != -100).sum()
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": count}


def behind_others(seed: int) -> Batch:
    """Rows behind a tensor of one row, and tokens behind one with another number of columns."""
    given = labelled_unevenly(seed)
    ids, ones = given["input_ids"], torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return {
        "position_ids": torch.arange(LENGTH)[None],
        "attention_mask": ones.tril().expand(ROWS, 1, -1, -1).contiguous(),
        "labels": ids,
        "input_ids": ids,
    }


def classes(seed: int) -> Batch:
    """Of several classes each row has any, which come first."""
    ids = labelled_unevenly(seed)["input_ids"]
    return {"labels": (ids[:, :3] % 2).float(), "input_ids": ids}


def choices(seed: int) -> Batch:
    """Each row is several sequences, one of which is to be chosen."""
    ids = labelled_unevenly(seed)["input_ids"]
    return {"input_ids": torch.stack([ids, ids.flip(1)], 1), "labels": ids[:, 0] % 2}


def spans(seed: int) -> Batch:
    """Of each row a span is to be found."""
    begins = torch.arange(ROWS)
    ids = labelled_unevenly(seed)["input_ids"]
    return {"input_ids": ids, "start_positions": begins, "end_positions": begins + 2}


def _bert(kind: Any, labels: int = 3) -> Callable[[], nn.Module]:
    return lambda: kind(
        hf.BertConfig(
            vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, num_labels=labels,
        )
    )  # fmt: skip


FORMS = {
    "all labels": Case("all labels", DEEP["llama"].build, labelled_unevenly),
    "behind others": Case("behind others", DEEP["llama"].build, behind_others),
    "classes": Case("classes", _bert(hf.BertForSequenceClassification), classes),
    "choices": Case("choices", _bert(hf.BertForMultipleChoice), choices),
    "spans": Case("spans", _bert(hf.BertForQuestionAnswering, 2), spans),
}
WHOLE = ("all labels",)
"""Whose loss is that of the whole batch, however it is divided."""


def plain(case: Case) -> list[float]:
    """Losses of plain PyTorch; of micro-batches unless the loss is that of all."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    count = 1 if case.name in WHOLE else MICROBATCHES
    return accumulated(model, optimizer, (_parts(case, seed, count) for seed in range(STEPS)))


def _parts(case: Case, seed: int, count: int) -> list[Batch]:
    parts = [dict(case.batch(seed)) for _ in range(count)]
    for name, value in case.batch(seed).items():
        if value.ndim > 0 and len(value) == ROWS:
            for part, own in zip(parts, value.chunk(count), strict=True):
                part[name] = own
    return parts


def execute(boosted: Any, case: Case) -> list[float]:
    """Losses through execute_pipeline."""
    losses = []
    for seed in range(STEPS):
        data = iter([case.batch(seed)])
        done = boosted.booster.execute_pipeline(data, boosted.model, None, boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        losses.append(done["loss"].item())
    return losses


def forms(directory: Path) -> None:
    """Losses of batches of each form, in a row of stages and in a V; one with parts of layers."""
    found = {name: execute(boost(case), case) for name, case in FORMS.items()}
    of_all = FORMS["all labels"]
    found["all labels, zbv"] = execute(boost(of_all, **ZERO_BUBBLE), of_all)
    found["all labels, tp_size"] = execute(boost(of_all, pp_size=1, tp_size=2), of_all)
    write(directory, "forms", found)


if __name__ == "__main__":
    as_rank.run(globals())
