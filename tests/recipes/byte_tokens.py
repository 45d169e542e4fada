"""Trains small tokenizers on the texts of a test."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str],
    *,
    unknown: str = "<unk>",
    every_byte: bool = False,
) -> Tokenizer:
    """A byte-level BPE whose first ids are the special tokens; `every_byte`: no text is unknown."""
    tokens = Tokenizer(models.BPE(unk_token=unknown))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if every_byte else [],
        show_progress=False,
    )
    tokens.train_from_iterator(texts, trainer)
    return tokens
