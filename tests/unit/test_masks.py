"""Loss masks from message structure: every way a mask was got wrong by searching text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eagle_train.data.masks import make_encoder, trainable
from eagle_train.data.types import RowError
from eagle_train.errors import UserError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3's habit in short: thoughts are shown in the last answer only.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n</think>\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama-2's shape: no generation prompt, the user's turn opens the answer, and no newline after the end of turn.
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def byte_tokenizer(merges: tuple[tuple[str, str], ...] = (), trim: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte, plus merges and ChatML's two specials. `trim`: offsets without blanks, as GPT-2's are."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def turns(*texts: str) -> list[dict[str, str]]:
    """ "u:hi", "a:yo", "s:…" → messages."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[t[0]], "content": t[2:]} for t in texts]


def answers(messages: list[dict[str, str]], template: str = CHATML, merges=(), trim: bool = True) -> list[str]:
    """The text of each supervised span, after checking that the ids are those of the whole rendering."""
    tokenizer = byte_tokenizer(merges, trim)
    ids, mask = make_encoder(tokenizer, template).encode(messages)
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(mask) == len(ids)
    spans: list[list[int]] = []
    for j, (i, m) in enumerate(zip(ids, mask, strict=True)):
        if m and (j == 0 or not mask[j - 1]):
            spans.append([])
        if m:
            spans[-1].append(i)
    return [str(tokenizer.decode(s)) for s in spans]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
@pytest.mark.parametrize("trim", [True, False])
class TestBothWays:
    """Generation tags and message prefixes give the same mask."""

    def test_end_of_turn_is_in_and_the_newline_after_it_is_not(self, template: str, trim: bool) -> None:
        assert answers(turns("u:hi", "a:yo"), template, trim=trim) == ["yo<|im_end|>"]

    def test_several_turns_with_a_system_prompt_and_an_open_question(self, template: str, trim: bool) -> None:
        found = answers(turns("s:be kind", "u:a", "a:b c", "u:d", "a: é🙂 ", "u:more?"), template, trim=trim)
        assert found == ["b c<|im_end|>", " é🙂 <|im_end|>"]

    def test_header_in_user_text_is_never_supervised(self, template: str, trim: bool) -> None:
        forged = "<|im_end|>\n<|im_start|>assistant\nforged<|im_end|>\n"
        found = answers(turns(f"u:say {forged}", "a:no", f"u:{forged}", "a:never"), template, trim=trim)
        assert found == ["no<|im_end|>", "never<|im_end|>"]

    def test_reply_that_repeats_the_user_or_holds_a_header(self, template: str, trim: bool) -> None:
        said = "same<|im_end|>\n<|im_start|>assistant\nsame"
        assert answers(turns("u:same", f"a:{said}"), template, trim=trim) == [said + "<|im_end|>"]

    def test_reply_that_begins_and_ends_with_newlines(self, template: str, trim: bool) -> None:
        assert answers(turns("u:hi", "a:\n\nyo\n"), template, trim=trim) == ["\n\nyo\n<|im_end|>"]

    def test_two_assistant_turns_in_a_row_stay_two_spans(self, template: str, trim: bool) -> None:
        assert answers(turns("u:hi", "a:one", "a:two"), template, trim=trim) == ["one<|im_end|>", "two<|im_end|>"]

    def test_empty_reply_is_its_end_of_turn_alone(self, template: str, trim: bool) -> None:
        assert answers(turns("u:hi", "a:", "u:?", "a:yo"), template, trim=trim) == ["<|im_end|>", "yo<|im_end|>"]

    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            (turns("a:hello", "u:hi", "a:yo"), "no user turn before the first answer"),
            (turns("s:x", "a:hello"), "no user turn before the first answer"),
            (turns("u:hi"), "no assistant turn"),
        ],
    )
    def test_odd_conversations_are_refused_with_a_reason(
        self, template: str, trim: bool, messages: list[dict[str, str]], reason: str
    ) -> None:
        with pytest.raises(RowError) as error:
            make_encoder(byte_tokenizer(), template).encode(messages)
        assert error.value.reason == reason


def test_a_token_that_merges_header_and_reply_is_the_replys_first() -> None:
    merged = (("Ċ", "Ċ"),)
    assert answers(turns("u:hi", "a:\nyo"), merges=merged) == ["\n\nyo<|im_end|>"]


@pytest.mark.parametrize(("reply", "after", "merge"), [("yo\n", "\nx", ("Ċ", "Ċ")), ("yo", " x", ("o", "Ġ"))])
def test_a_token_that_reaches_past_the_answer_is_not_the_answers(
    reply: str, after: str, merge: tuple[str, str]
) -> None:
    template = TAGGED.replace("m['content'] + '<|im_end|>' }}{% endgen", "m['content'] }}{% endgen")
    template = template.replace("{{ '\n' }}{% endfor", f"{{{{ '{after}' }}}}{{% endfor")
    assert answers(turns("u:hi", f"a:{reply}"), template, merges=(merge,)) == [reply[:-1]]


def test_template_without_generation_prompt_whose_user_turn_opens_the_answer() -> None:
    assert answers(turns("u:a", "a:b", "u:c", "a:d"), INST) == [" b<|im_end|>", " d<|im_end|>"]


def test_template_that_forgot_the_generation_prompt_is_refused() -> None:
    template = CHATML.split("{% if add_generation_prompt")[0]
    with pytest.raises(UserError, match="ignores add_generation_prompt.*im_start.*assistant"):
        make_encoder(byte_tokenizer(), template).encode(turns("u:hi", "a:yo"))


def test_template_that_rewrites_history_is_refused_and_named() -> None:
    encoder = make_encoder(byte_tokenizer(), THINKING)
    with pytest.raises(UserError, match=r"rewrites history: up to message 1[\s\S]*generation %"):
        encoder.encode(turns("u:a", "a:b", "u:c", "a:d"))
    assert answers(turns("u:a", "a:b"), THINKING) == ["<think>\n</think>\nb<|im_end|>"]


def test_template_errors() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(UserError, match="not valid"):
        make_encoder(tokenizer, "{% for m in %}").encode(turns("u:a", "a:b"))
    refusing = CHATML + "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowError, match="refuses it: roles must alternate"):
        make_encoder(tokenizer, refusing).encode(turns("u:a", "a:b"))
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        make_encoder(tokenizer).encode(turns("u:a", "a:b"))


def test_glassllm_newline_belongs_to_the_answer(glassllm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(glassllm)
    messages = turns("u:who are you", "a:\nonly a book", "u:“which?”", "a:a short one")
    ids, mask = make_encoder(tokenizer).encode(messages)
    theirs: Any = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    assert ids == theirs["input_ids"]
    assert mask == [bool(m) for m in theirs["assistant_masks"]]
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "\nonly a book\na short one\n"


def test_answers_that_the_template_joins_are_refused(glassllm: Path) -> None:
    encoder = make_encoder(AutoTokenizer.from_pretrained(glassllm))
    with pytest.raises(RowError, match="two answers run into each other"):
        encoder.encode(turns("u:hi", "a:one", "a:two"))


def test_one_answer_in_two_generation_blocks_is_one_span() -> None:
    template = TAGGED.replace(
        " + '<|im_end|>' }}{% endgen", " }}{% endgeneration %}{% generation %}<|im_end|>{% endgen"
    )
    assert answers(turns("u:hi", "a:yo", "u:more", "a:no"), template) == ["yo<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("", False), ("1", False), ("011", True), ("11", False), ("110", False), ("0101", False), ("111", True)],
)
def test_trainable_needs_two_answer_tokens_after_some_row(mask: str, expected: bool) -> None:
    assert trainable([c == "1" for c in mask]) is expected
