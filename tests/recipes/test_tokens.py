"""Loss masks against masks by hand, over random conversations and chat templates."""

import random
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from castor.recipes.data import IGNORED
from castor.recipes.data.formats import BrokenRowError, Conversation, Text
from castor.recipes.data.tokens import ChatTemplate, NoTemplateError, Tokenizing, Tokens
from chat_cases import CHATML, LLAMA2, LLAMA3, TEMPLATES, conversation, mask_by_hand, tokenizer

QUESTION = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "because"}


def encode(tokenizing: Tokenizing, row: Conversation | Text) -> Tokens:
    text, spans = tokenizing.characters(row)
    (found,) = tokenizing([(text, spans, isinstance(row, Text))])
    assert isinstance(found, Tokens), found
    return found


def labels_of(tokens: Tokens) -> list[int]:
    """The ids where the loss counts them, IGNORED elsewhere."""
    labels = [IGNORED] * len(tokens.ids)
    for begin, end in tokens.counted:
        labels[begin:end] = tokens.ids[begin:end]
    return labels


@pytest.mark.parametrize("pieces", [True, False], ids=["learned pieces", "rendered prefixes"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_mask_is_the_one_by_hand(
    name: str, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, by_hand = TEMPLATES[name]
    words = tokenizer(template)
    tokenizing = Tokenizing(words, None, loss_on="assistant")
    if not pieces:
        monkeypatch.setattr(ChatTemplate, "_by_pieces", lambda *_: None)
    choice = random.Random(name)
    for _ in range(200):
        messages = conversation(choice, reasons=name == "reasoning")
        found = encode(tokenizing, Conversation(messages))
        ids, labels = mask_by_hand(words, by_hand(messages))
        rendered = words.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert found.ids == ids == rendered
        assert labels_of(found) == labels, messages
        assert any(label != -100 for label in labels)


def counted(words: object, row: Conversation | Text) -> str:
    """What the loss counts, as text, with | between ranges."""
    tokenizing = Tokenizing(words, None, loss_on="assistant")
    tokens = encode(tokenizing, row)
    decode = tokenizing._tokenizer.decode
    return "|".join(decode(tokens.ids[begin:end]) for begin, end in tokens.counted)


def test_a_template_without_special_tokens_merges_across_borders() -> None:
    """Otherwise the cases above would not hold what they are for."""
    template, by_hand = TEMPLATES["trimmed"]
    words, merged = tokenizer(template), 0
    choice = random.Random(1)
    for _ in range(50):
        pieces = by_hand(conversation(choice))
        whole = words("".join(text for text, _ in pieces), add_special_tokens=False)["input_ids"]
        apart = [
            i for text, _ in pieces for i in words(text, add_special_tokens=False)["input_ids"]
        ]
        merged += whole != apart
    assert merged > 0


def test_a_conversation_may_begin_with_the_assistant() -> None:
    row = Conversation([ANSWER, QUESTION, ANSWER])
    assert counted(tokenizer(CHATML), row) == "because<|im_end|>\n|because<|im_end|>\n"


def test_only_the_completion_of_a_prompt_counts() -> None:
    row = Conversation([QUESTION, {**ANSWER, "content": "no"}, QUESTION, ANSWER], loss_from=3)
    assert counted(tokenizer(CHATML), row) == "because<|im_end|>\n"


def test_marks_of_the_template_are_followed() -> None:
    template = (
        "{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{{ '<|eot|>' }}{% endfor %}"
    )
    row = Conversation([QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "it is"}])
    assert counted(tokenizer(template), row) == "because|it is"
    row = Conversation(row.messages, loss_from=2)
    assert counted(tokenizer(template), row) == "it is"


def test_a_reasoning_that_the_prompt_opens_and_the_turn_lacks() -> None:
    template, _ = TEMPLATES["reasoning"]
    thought = {**ANSWER, "content": "<think>\nhm\n</think>\n\nyes"}
    row = Conversation([QUESTION, thought, QUESTION, thought])
    assert counted(tokenizer(template), row) == ("yes<|im_end|>\n|hm\n</think>\n\nyes<|im_end|>\n")


def test_what_a_template_refuses_is_told() -> None:
    words = tokenizer(LLAMA2)
    with pytest.raises(BrokenRowError, match="refuses the conversation: roles must alternate"):
        Tokenizing(words, None, loss_on="all").characters(Conversation([QUESTION, QUESTION]))


def test_a_template_that_hides_a_turn_is_refused_by_name() -> None:
    template = (
        "{% for m in messages %}{{ loop.length ~ m['role'] ~ (m['content'] | length) }}{% endfor %}"
    )
    row = Conversation([QUESTION, ANSWER, QUESTION, ANSWER])
    with pytest.raises(BrokenRowError, match=r"does not show where turn 2, the assistant's"):
        Tokenizing(tokenizer(template), None, loss_on="assistant").characters(row)
    with pytest.raises(NoTemplateError, match=r"name a file with one in data\.chat_template"):
        Tokenizing(tokenizer(), None, loss_on="assistant").characters(row)


def test_tokenizers_without_offsets_compare_ids() -> None:
    words = ByT5Tokenizer()
    assert not words.is_fast
    words.chat_template = TEMPLATES["trimmed"][0]
    row = Conversation([QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "naïve 数据"}])
    assert counted(words, row) == "because\n\n|naïve 数据\n\n"


class Merging:
    """A tokenizer without offsets, of pairs of characters."""

    eos_token_id = 0
    chat_template = TEMPLATES["trimmed"][0]

    def __call__(self, text: str | list[str], **_: object) -> object:
        from transformers import BatchEncoding

        def ids(one: str) -> list[int]:
            return [hash(one[at : at + 2]) % 1000 for at in range(0, len(one), 2)]

        found = ids(text) if isinstance(text, str) else [ids(one) for one in text]
        return BatchEncoding({"input_ids": found})


def test_tokenizers_that_merge_without_offsets_are_refused_by_name() -> None:
    tokenizing = Tokenizing(Merging(), None, loss_on="assistant")
    (found,) = tokenizing([("abc", [(1, 3)], False)])
    assert isinstance(found, BrokenRowError)
    assert "(Merging) has no character offsets and merges tokens across character 1" in str(found)


def test_ids_are_those_of_a_call_of_the_tokenizer() -> None:
    words, choice = tokenizer(CHATML), random.Random(0)
    words.backend_tokenizer.enable_truncation(3)  # as a tokenizer.json may say
    words.backend_tokenizer.enable_padding()
    texts = ["", "a", "<|im_end|> within", "".join(choice.choices("why s\n", k=40))]
    tokenizing = Tokenizing(words, None, loss_on="all")
    for spans in ([(0, 1)], None):  # with offsets and without
        rows = [(text, spans or [(0, len(text))], False) for text in texts]
        found = [one.ids for one in tokenizing(rows) if isinstance(one, Tokens)]
        assert found == words(texts, add_special_tokens=False)["input_ids"]

    class Shouting(type(words)):  # type: ignore[misc]
        def __call__(self, text: Any, **options: Any) -> Any:
            return super().__call__([one.upper() for one in text], **options)

    words.__class__ = Shouting
    (found_own,) = Tokenizing(words, None, loss_on="all")([("why", [(0, 3)], False)])
    assert isinstance(found_own, Tokens)
    assert found_own.ids == words(["why"], add_special_tokens=False)["input_ids"][0]


def test_a_text_ends_with_the_end_token_and_a_prompt_does_not_count() -> None:
    words = tokenizer()
    assert encode(Tokenizing(words, None, loss_on="assistant"), Text("a b")).ids[-1] == 2
    assert counted(words, Text("a b")) == "a b</s>"
    assert counted(words, Text("question: answer", 9)) == " answer</s>"
    everything = encode(Tokenizing(words, None, loss_on="all"), Text("question: answer", 9))
    assert labels_of(everything) == everything.ids


def test_all_tokens_count_where_that_is_asked_for() -> None:
    row = Conversation([QUESTION, ANSWER])
    tokens = encode(Tokenizing(tokenizer(LLAMA3), None, loss_on="all"), row)
    assert labels_of(tokens) == tokens.ids
