#!/usr/bin/env bash
# Guess: num_tokens, which TRL logs as the tokens trained on so far, goes on where it was when a run is resumed, as the
# step, the epoch and GRPO's figure of that name do.
# What happens: SFTTrainer counts in the process, and no checkpoint has the count. Behind a resume num_tokens begins at 0
# again while the step goes on, so that curves over it run back.
# Seen with trl 1.16.0, transformers 5.24.0, torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 trl==1.16.0 transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0 numpy==2.4.6 tokenizers
cat >resumes.py <<'PY'
import datasets
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

datasets.disable_progress_bars()
words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"abcdefgh"])}
inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
rows = datasets.Dataset.from_dict({"text": ["a b c d e f g"] * 16})  # 8 tokens each, with eos


def train(steps: int, resume: bool) -> list[dict[str, float]]:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir="run", max_steps=steps, save_steps=2, logging_steps=1, per_device_train_batch_size=2,
            report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, max_length=16, packing=False,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.log_history


print("trl", trl.__version__)
train(2, resume=False)
for entry in train(4, resume=True):
    if "num_tokens" in entry and "loss" in entry:
        print("step", entry["step"], "num_tokens", int(entry["num_tokens"]))
PY
env/bin/python resumes.py 2>errors.txt >all.txt || { cat errors.txt; exit 1; }
grep -E "^(trl|step)" all.txt | tee out.txt
grep -qx "step 2 num_tokens 32" out.txt
grep -qx "step 3 num_tokens 16" out.txt
