"""Messages → token ids and loss mask, from the structure of the conversation and never by searching its text.

The chat template renders the conversation once; that text is tokenized once. Which characters the assistant wrote is
known from the template's `{% generation %}` blocks or, where it has none, from renderings of message prefixes:

    full      <s>user\\nhi<e>\\n<s>assistant\\nyo<e>\\n<s>user …
    prompt    <s>user\\nhi<e>\\n<s>assistant\\n               messages before it + generation prompt: it begins
    answered  <s>user\\nhi<e>\\n<s>assistant\\nyo<e>\\n        messages up to and with it: it ends, …
    answer                                  yo<e>          … after its last special token if only blanks follow that

Both prefixes must be prefixes of `full`. A token belongs to the answer if it ends inside it: one that begins before the
answer (a reply's "\\n" merged with the header's) is the answer's first token, which no draft ever predicts; one that
reaches past the end is not the answer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from eagle_train.data.types import RowError
from eagle_train.errors import UserError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TAGS_HINT = "use a template with {% generation %} … {% endgeneration %} around the assistant's text"
Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]


def trainable(mask: Sequence[bool]) -> bool:
    """Whether some row i has x_{i+1} and x_{i+2} in one answer span: the depth-0 row that an engine would visit."""
    return any(mask[j] and mask[j + 1] for j in range(1, len(mask) - 1))


@dataclass(frozen=True)
class Encoder:
    """Encodes conversations by one template; make it with `make_encoder`."""

    template: str | None
    backend: Tokenizer
    special: frozenset[int]
    """Ids of special tokens, among them the end of a turn."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Names that the template may use, such as bos_token."""

    def encode(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[list[int], list[bool]]:
        """ids [T] and mask [T] of one conversation.

        Raises:
            RowError: this conversation has no usable answer, or the template refuses it.
            UserError: no template, or one from which no mask can be had.
        """
        template, answers = self._template(), _answers(messages)
        text, spans = self._render(messages, tools, generation_prompt=False)
        encoding = self.backend.encode(text, add_special_tokens=False)
        if not _GENERATION.search(template):
            found = [self._prefix_span(text, messages, tools, k) for k in answers]
            spans = [_cut_after_special(span, text, encoding, self.special) for span in found]
        mask, joined = _token_mask(encoding.offsets, spans)
        if joined and _runs(mask) < len(answers):
            raise RowError("two answers run into each other", "the template puts nothing between them")
        return list(encoding.ids), mask

    def _template(self) -> str:
        if self.template is None:
            raise UserError(
                "the tokenizer has no chat template, and the data holds conversations.",
                hint="give a template file, or data with token ids",
            )
        return self.template

    def _render(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]], generation_prompt: bool
    ) -> tuple[str, list[Span]]:
        """The text, and the spans of its generation blocks (none if the template has no tags)."""
        template = self._template()
        tagged = bool(_GENERATION.search(template))
        try:
            renderer: Any = render_jinja_template  # its annotations are wrong
            texts, spans = renderer(
                conversations=[[dict(m) for m in messages]],
                tools=[dict(t) for t in tools] or None,
                chat_template=template,
                return_assistant_tokens_mask=tagged,
                add_generation_prompt=generation_prompt,
                **self.variables,
            )
        except TemplateSyntaxError as error:
            raise UserError(f"the chat template is not valid (line {error.lineno}): {error.message}") from None
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError("the chat template refuses it", str(error)) from None
        return texts[0], [(a, b) for a, b in spans[0]] if tagged else []

    def _prefix_span(self, text: str, messages: Messages, tools: Sequence[Mapping[str, Any]], k: int) -> Span:
        """Where in `text` message k, an answer, begins and ends."""
        before, _ = self._render(messages[:k], tools, generation_prompt=False)
        prompt, _ = self._render(messages[:k], tools, generation_prompt=True)
        answered, _ = self._render(messages[: k + 1], tools, generation_prompt=False)
        for part, what in ((prompt, "generation prompt"), (answered, "answer")):
            if not text.startswith(part) or len(part) < len(prompt):
                raise UserError(
                    f"the chat template rewrites history: up to message {k}, the {what} is not rendered the same way "
                    f"alone and in the whole conversation.\n{_difference(text, part)}",
                    hint=f"{_TAGS_HINT}, or keep one answer per row",
                )
        if prompt == before:
            # Some templates need no generation prompt; in one that forgot it, the header would pass for the answer.
            said = str(messages[k].get("content") or "").strip()
            if not text[len(prompt) :].lstrip().startswith(said):
                raise UserError(
                    "the chat template ignores add_generation_prompt, so the assistant's header cannot be told from "
                    f"its answer: {text[len(prompt) : len(prompt) + 40]!r}",
                    hint=_TAGS_HINT,
                )
        return len(prompt), len(answered)


def make_encoder(tokenizer: PreTrainedTokenizerBase, template_text: str | None = None) -> Encoder:
    """An encoder for `tokenizer`; `template_text` replaces the tokenizer's own chat template.

    Raises:
        UserError: a tokenizer without offsets (not a "fast" one).
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{type(tokenizer).__name__} gives no character offsets; a fast tokenizer is needed.")
    own: Any = tokenizer
    backend = Tokenizer.from_str(own.backend_tokenizer.to_str())
    backend.encode_special_tokens = own.backend_tokenizer.encode_special_tokens
    # Byte-level post-processors trim blanks off the offsets: a token would seem to end where its blank begins.
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    special = {i for i, token in own.added_tokens_decoder.items() if token.special} | set(own.all_special_ids)
    template = template_text
    if template is None and own.chat_template:
        template = own.get_chat_template()
    variables = {k: str(v) for k, v in own.special_tokens_map.items() if isinstance(v, str)}
    return Encoder(template, backend, frozenset(special), variables)


def _answers(messages: Messages) -> list[int]:
    roles = [m["role"] for m in messages]
    if "assistant" not in roles:
        raise RowError("no assistant turn")
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError("no user turn before the first answer")
    return [k for k, role in enumerate(roles) if role == "assistant"]


def _cut_after_special(span: Span, text: str, encoding: Any, special: frozenset[int]) -> Span:
    begin, end = span
    for token, (a, b) in zip(reversed(encoding.ids), reversed(encoding.offsets), strict=True):
        if a < begin or text[b:end].strip():
            break
        if b <= end and token in special:
            return begin, b
    return span


def _token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> tuple[list[bool], bool]:
    """mask [T], and whether two spans touch, so that the mask alone no longer tells them apart."""
    owner = [-1] * len(offsets)
    s = 0
    for t, (begin, end) in enumerate(offsets):
        while s < len(spans) and spans[s][1] <= begin:
            s += 1
        if s < len(spans) and spans[s][0] < end <= spans[s][1]:
            owner[t] = s
    joined = any(a >= 0 and b >= 0 and a != b for a, b in zip(owner, owner[1:], strict=False))
    return [o >= 0 for o in owner], joined


def _runs(mask: Sequence[bool]) -> int:
    return sum(m and not (t and mask[t - 1]) for t, m in enumerate(mask))


def _difference(text: str, part: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(text, part, strict=False)) if a != b), min(len(text), len(part)))
    return f"  whole: …{text[max(0, at - 20) : at + 30]!r}\n  alone: …{part[max(0, at - 20) : at + 30]!r}"
