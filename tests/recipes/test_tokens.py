"""Loss masks against masks by hand, over random conversations and chat templates."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import ByT5Tokenizer

from castor.recipes.data import IGNORED
from castor.recipes.data.formats import BrokenRowError, Conversation, Text, parse
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


FUNCTION = {"name": "f", "arguments": '{"a": 1}'}
CALL = {
    "role": "assistant", "content": None,
    "tool_calls": [{"type": "function", "id": "call00001", "function": FUNCTION}],
}  # fmt: skip
TURNS = [QUESTION, CALL, {"role": "tool", "tool_call_id": "call00001", "content": "2"}, ANSWER]
PUBLISHED = {
    "qwen3": (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "|<think>\n\n</think>\n\nbecause<|im_end|>\n"
    ),
    "qwen2_5": (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "|because<|im_end|>\n"
    ),
    "llama3_2": '{"name": "f", "parameters": {"a": 1}}<|eot_id|>|because<|eot_id|>',
    "gptoss": (
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "|<|channel|>final<|message|>because<|return|>"
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"  # noqa: RUF001
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'  # noqa: RUF001
        "<｜end▁of▁sentence｜>|because<｜end▁of▁sentence｜>"  # noqa: RUF001
    ),
    "nemotron_3_nano": (
        "</think>\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
        "</tool_call>\n<|im_end|>\n|</think>because<|im_end|>\n"
    ),
}
"""Templates of families that TRL has, and what the loss counts of TURNS."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_templates_of_families_show_the_turns_of_a_conversation_with_tools(name: str) -> None:
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    row = parse({"messages": TURNS}, "messages")
    assert isinstance(row, Conversation)
    assert "|".join(counted_texts(template, row)) == PUBLISHED[name]
    again = Conversation([*row.messages, QUESTION, {**ANSWER, "content": "so"}])
    assert len(counted_texts(template, again)) == 3


def test_a_template_that_ends_turns_otherwise_at_the_end_shows_earlier_ones() -> None:
    template = (Path(trl.__file__).parent / "chat_templates" / "phi3.jinja").read_text("utf-8")
    row = Conversation([QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "so"}])
    assert counted_texts(template, row) == ["because<|end|>", "so<|end|>\n</s>"]
    row = parse({"messages": TURNS}, "messages")
    assert isinstance(row, Conversation)
    with pytest.raises(BrokenRowError, match="does not write the function 'f' of 'tools' or"):
        counted_texts(template, row)


def counted_texts(template: str, row: Conversation) -> list[str]:
    """The characters that the loss counts, of a tokenizer with the special tokens of templates."""
    words = copy.deepcopy(tokenizer())
    words.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|im_end|>", "<|user|>"]})
    text, spans = Tokenizing(words, template, loss_on="assistant").characters(row)
    return [text[begin:end] for begin, end in spans]


def test_a_turn_of_weight_0_does_not_count() -> None:
    row = parse({"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, ANSWER]}, "messages")
    assert isinstance(row, Conversation)
    assert counted(tokenizer(CHATML), row) == "because<|im_end|>\n"


@pytest.mark.parametrize(
    "write",
    [
        "(c['function']['arguments'] | tojson)",  # an object; a text would come in quotes
        "('' + c['function']['arguments'])",  # a text; an object cannot be added to one
    ],
)
def test_arguments_of_tool_calls_are_written_as_the_template_takes_them(write: str) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] ~ WRITE }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ).replace("WRITE", write)
    for arguments in ('{"city": "Rom"}', {"city": "Rom"}):
        function = {"name": "f", "arguments": arguments}
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        row = parse({"messages": [QUESTION, call]}, "messages")
        assert isinstance(row, Conversation)
        assert counted(tokenizer(template), row) == 'f{"city": "Rom"}<|im_end|>\n'


def test_tool_calls_that_are_none_are_refused() -> None:
    tokenizing = Tokenizing(tokenizer(CHATML), None, loss_on="assistant")
    for call, said in (
        ({"function": {"name": "f", "arguments": "{"}}, "arguments of a tool call are no JSON"),
        ({"function": {"arguments": "{}"}}, "is no call of a function with a name"),
    ):
        with pytest.raises(BrokenRowError, match=said):
            tokenizing.characters(Conversation([QUESTION, {**ANSWER, "tool_calls": [call]}]))


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
    words = copy.deepcopy(words)  # other tests have the same one
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
