#!/usr/bin/env bash
# Guess: bf16_full_eval=True evaluates in bfloat16 and leaves training alone: "only applies during evaluation", as its
# documentation says.
# What happens: it is the other way round. evaluate() before train(), the usual way to a baseline, casts the model's own
# weights to bfloat16 and never back: train() then trains weights of 8 bits, which steps of a small learning rate no
# longer move, and saves those. Evaluations within train(), for which the setting is meant, compute in float32 as ever.
# Nothing is said. fp16_full_eval does the same.
# Seen with transformers 5.24.0, torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6
cat >rounds.py <<'PY'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__, "torch", torch.__version__, flush=True)
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    bos_token_id=0,
    eos_token_id=1,
)


def train(full_eval, baseline):
    """Trains 8 steps; returns types of weights in evaluations within train() and behind it, and the share that moved."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (16, 16))]
    args = TrainingArguments(
        output_dir="out",
        bf16_full_eval=full_eval,
        per_device_train_batch_size=2,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    within = set()

    def note(module, _inputs):
        if not module.training and trainer.is_in_train:
            within.add(module.lm_head.weight.dtype)

    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows)
    model.register_forward_pre_hook(note)
    if baseline:
        trainer.evaluate()
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    trainer.train()
    moved = sum(int((param != first[name]).sum()) for name, param in model.named_parameters())
    moved /= sum(param.numel() for param in model.parameters())
    assert len(within) == 1
    return within.pop(), model.lm_head.weight.dtype, moved


for full_eval in (False, True):
    for baseline in (False, True):
        within, behind, moved = train(full_eval, baseline)
        print(
            f"bf16_full_eval {full_eval}, evaluate() before train() {baseline}: evaluations within train() in {within}, "
            f"trained weights {behind}, {moved:.0%} of them moved",
            flush=True,
        )
        expected = torch.bfloat16 if full_eval and baseline else torch.float32
        assert within is behind is expected, "this is otherwise now"
        assert moved < 0.6 if full_eval and baseline else moved > 0.95, "this is otherwise now"
print("as described")
PY
env/bin/python rounds.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "as described" out.txt
