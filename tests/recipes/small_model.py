"""A model of random weights, a tokenizer of castor's own pages, and rows to train them on."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from byte_tokens import byte_level_bpe

PAGES = Path(__file__).parents[2] / "docs"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>"]
NUM_ROWS = 24


def make(path: Path) -> Path:
    """Writes a folder `model` and the files `chats.jsonl`, `pairs.jsonl` and `text.jsonl`."""
    texts = [
        paragraph[:400]
        for page in sorted(PAGES.rglob("*.md"))
        for paragraph in page.read_text(encoding="utf-8").split("\n\n")
        if len(paragraph) > 300
    ][:NUM_ROWS]
    chats = [
        {
            "messages": [
                {"role": "user", "content": text[:60]},
                {"role": "assistant", "content": text[60:200]},
            ]
        }
        for text in texts
    ]
    pairs = [
        {"prompt": text[:60], "chosen": text[60:150], "rejected": other[60:150]}
        for text, other in zip(texts, reversed(texts), strict=True)
    ]
    path.mkdir(parents=True, exist_ok=True)
    plain = [{"text": text} for text in texts]
    for name, rows in (("chats", chats), ("pairs", pairs), ("text", plain)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(texts, 512, SPECIAL),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
    ).save_pretrained(path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path / "model")
    return path
