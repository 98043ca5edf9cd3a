"""The demo tokenizer with Hermes' tags, as tokens of their own or as text only, and a template in Qwen3's shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from support.serving import VOCAB, text_side
from tokenizers import AddedToken

from runtime.demo.tokenizer import demo_tokenizer
from runtime.parsing import Vocabulary
from runtime.parsing.dialect import HERMES
from runtime.server.service import TextSide
from runtime.server.template import ChatTemplate
from runtime.server.tokenizer import TextTokenizer

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
START, END = "<|im_start|>", "<|im_end|>"

TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
{{ "<think>\\n\\n</think>\\n\\n" }}
{%- endif -%}
{%- endif -%}
"""

Cut = Callable[[str], list[int]]


@cache
def hermes_tokenizer(*, with_tokens: bool = True) -> TextTokenizer:
    """`with_tokens`: the tags are tokens, as in Qwen3's vocabulary; they are no control tokens there."""
    tokenizer = demo_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (START, END)])
    if with_tokens:
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TAGS])
    return TextTokenizer(tokenizer, "the tests' tokenizer")


def hermes_vocabulary(*, with_tokens: bool) -> tuple[Vocabulary, Callable[[str, Cut], list[int]]]:
    """The vocabulary, and the way to ids: tags become tokens where they are, other text is cut by the caller."""
    vocabulary = hermes_tokenizer(with_tokens=with_tokens).vocabulary
    known = [text for text in (START, *TAGS) if text in vocabulary.ids]

    def encode(text: str, cut: Cut) -> list[int]:
        tokens: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, known)) + ")", text):
            if part in vocabulary.ids:
                tokens.append(vocabulary.ids[part])
            elif part:
                tokens += cut(part)
        return tokens

    return vocabulary, encode


def hermes_side() -> TextSide:
    """A server's text side in the Hermes dialect."""
    tokenizer = hermes_tokenizer()
    end = tokenizer.vocabulary.ids[END]
    template = ChatTemplate(TEMPLATE, "the tests' template", tokenizer, {})
    side = text_side(HERMES, window=2048, end_ids=(end,))
    assert tokenizer.size <= VOCAB
    return replace(side, tokenizer=tokenizer, template=template)
