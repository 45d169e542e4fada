"""`castor init`: writes a commented recipe that runs as it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import cast, get_args

import yaml  # type: ignore[import-untyped]

from castor.config import did_you_mean
from castor.errors import UsageError
from castor.model_files import find_config, most_tokens
from castor.recipes.recipe import LEARNING_RATES, OF_PAIRS, Method

_DATA = """\
  train: {data}
  format: auto            # or messages, sharegpt, alpaca, prompt_completion, preference, text,
                          # megatron
  held_out: 0.02          # rows to evaluate on: a share, a number of rows, or a file
  max_length: {length:<11} # tokens of the longest sequence
"""
_CUT = """\
  truncation: right       # of a longer one; drop leaves it out, refuse is an error
"""
_LEFT_OUT = """\
  truncation: drop        # of a longer pair: it is left out; refuse is an error
"""
_SPLIT = """\
  truncation: split       # of a longer one into several; or right, drop, refuse
"""
_OF_TOKENS = """\
  packing: true           # several documents in a sequence, kept apart
"""
_OF_CHATS = """\
  loss_on: assistant      # or all
  # chat_template: t.jinja  # in place of the tokenizer's own
"""
_RECIPE = """\
# castor train recipe.yaml --dry-run prints what this takes; castor train recipe.yaml trains, and
# goes on where it stopped. --set train.epochs=1 replaces a setting.
model:
  path: {model}
{weights}data:
{data}  broken_rows: refuse     # skip leaves out rows that cannot be read
method:
  name: {method}
  adapter: full           # lora trains adapters, qlora trains them on weights of 4 bits
  # lora: {{r: 8, lora_alpha: 8, target_modules: all-linear}}  # for lora and qlora
{own}train:
  epochs: 1               # or max_steps
  batch_size: 1           # {unit} in one forward of a rank
  gradient_accumulation: 8  # forwards in an optimizer step
  learning_rate: {rate:<8} # adapters want about ten times as much
  scheduler: cosine       # or linear, constant, constant_with_warmup
  warmup: 0.03            # a share of the steps, or a number of them
  weight_decay: 0.0
  max_grad_norm: 1.0
  # evaluate_every: 200   # steps; without it after each epoch
  seed: 0
memory:                   # any argument of GeminiPlugin
  precision: bf16         # or fp32, fp16
  # device_memory: 22GiB  # budgets; castor train chooses those that are left out from what is
  # host_memory: 48GiB    # free, and says so
  # activations: auto     # or keep, recompute, offload
  # nvme_path: /mnt/nvme  # for optimizer states that the host has no room for
parallel:
  nproc: null             # data-parallel ranks; null is one process
log:
  every: 10               # steps
  to: []                  # tensorboard, trackio
# evaluate:               # the trained model on tasks of lm-eval; castor evaluate does it later
#   tasks: [hellaswag]
output:
  dir: {output}
  save_every: 500         # steps between checkpoints
  keep: 2                 # checkpoints that stay
"""


def init(method: str, model: str, data: str) -> str:
    """Returns a commented recipe as YAML.

    Args:
        method: "sft", "dpo", "reward" or "pretrain".
        model: Folder of a model, or its name in the hub's cache.
        data: File or folder of the rows, or a hub name.

    Raises:
        UsageError: There is no such method.
        OSError, ValueError: There is no such model, or no such data.
    """
    known = get_args(Method)
    if method not in known:
        raise UsageError(
            f"there is no method {method!r}"
            f"{did_you_mean(method, known) or '; choose one of ' + ', '.join(known)}"
        )
    chosen = cast(Method, method)
    longest = 1024 if chosen == "dpo" else 2048
    length = min(longest, most_tokens(find_config(model)) or longest)
    looks_local = Path(data).suffix != "" or data.startswith((".", "/", "~"))
    path = Path(data).expanduser()
    if looks_local and not path.exists() and not Path(f"{path}.idx").exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), data)
    rows = _DATA.format(data=_quoted(data), length=length)
    rows += {"pretrain": _SPLIT, "reward": _LEFT_OUT}.get(chosen, _CUT)
    if chosen in ("sft", "pretrain"):
        rows += _OF_TOKENS
    if chosen == "sft":
        rows += _OF_CHATS
    return _RECIPE.format(
        model=_quoted(model),
        weights="  random_weights: false   # true trains the config.json from nothing\n"
        if chosen == "pretrain"
        else "",
        data=rows,
        method=chosen,
        own="  beta: 0.1               # weight of the distance to the reference model\n"
        if chosen == "dpo"
        else "",
        unit="pairs" if chosen in OF_PAIRS else "sequences",
        rate=f"{LEARNING_RATES[chosen]:.1e}",
        output=_quoted(f"runs/{chosen}"),
    )


def _quoted(text: str) -> str:
    """Returns a text as YAML, with quotes where it needs them."""
    listed: str = yaml.safe_dump([text], default_flow_style=True, allow_unicode=True, width=10**6)
    return listed.strip().removeprefix("[").removesuffix("]")
