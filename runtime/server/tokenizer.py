"""A checkpoint's tokenizer: text to ids and back, with and without markers.

Owns reading it and the two ways of encoding: `encode` takes the text of added tokens for the tokens, as templates and
raw prompts want it; `encode_plain` takes all text for text. Refuses vocabularies that are not byte-level.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Encoding, Tokenizer

from megakernel.config import ConfigError
from megakernel.config.canonical import digest
from runtime.parsing import Vocabulary

_LONG_CHARS = 4096


def _bytes_by_char() -> dict[str, int]:
    """The printable stand-ins by which byte-level vocabularies spell bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + idx): byte for idx, byte in enumerate(others)}


class TextTokenizer:
    """Wraps a byte-level `tokenizers.Tokenizer`; safe to use from any thread."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        """ConfigError, which names `source`, when the vocabulary is not byte-level."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.json = tokenizer.to_str()
        self.digest = digest(self.json.encode())
        state = cast("dict[str, Any]", json.loads(self.json))
        if not _is_byte_level(state.get("decoder")):
            kind = (state.get("decoder") or {}).get("type", "none")
            raise ConfigError(f"{source}: the tokenizer's decoder is {kind}; needed: a byte-level vocabulary")
        self._full = tokenizer
        self._plain = _without_added_tokens(state)
        self.vocabulary = _vocabulary(tokenizer)
        self.added = frozenset(self.vocabulary.ids.values())

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Read a checkpoint folder's tokenizer; ConfigError when there is none or it cannot be served."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - it brings torch along

        try:
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # noqa: BLE001 - of a damaged file, transformers raises what came of it
            said = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
            raise ConfigError(
                f"{folder}: no tokenizer can be read ({said}); needed: the checkpoint's tokenizer.json and "
                "tokenizer_config.json, whole"
            ) from None
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{folder}: the tokenizer has no tokenizer.json, which this server needs")
        return cls(backend, str(folder))

    @property
    def size(self) -> int:
        """Ids that have a token, counted from 0 to the largest."""
        return len(self.vocabulary.pieces)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode text in which added tokens may be written out; `add_special_tokens`: begin as the tokenizer does."""
        return _encoded(self._full, text, add_special_tokens=add_special_tokens).ids

    def encode_plain(self, text: str) -> list[int]:
        """Encode text in which nothing is a marker."""
        return _encoded(self._plain, text).ids

    def spans(self, text: str) -> Encoding:
        """Encode like `encode`, with offsets of tokens in `text`."""
        return _encoded(self._full, text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of whole tokens."""
        return self.vocabulary.text_of(tokens, skip_control=skip_special_tokens)


def _encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Encode one text; a long one as a batch, because only batches let other threads run meanwhile."""
    if len(text) < _LONG_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    kind = (decoder or {}).get("type")
    if kind == "Sequence":
        return any(map(_is_byte_level, cast("dict[str, Any]", decoder)["decoders"]))
    return kind == "ByteLevel"


def _without_added_tokens(state: dict[str, Any]) -> Tokenizer:
    """The same tokenizer without its added tokens, whose texts then have no ids of their own."""
    texts = {token["content"] for token in state["added_tokens"]}
    model = {
        **state["model"],
        "vocab": {text: idx for text, idx in state["model"]["vocab"].items() if text not in texts},
    }
    return Tokenizer.from_str(json.dumps({**state, "added_tokens": [], "post_processor": None, "model": model}))


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    table = _bytes_by_char()
    added = tokenizer.get_added_tokens_decoder()
    spelled = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max([*spelled.values(), *added]) + 1)
    for text, token in spelled.items():
        if token not in added:
            pieces[token] = (
                bytes(table[char] for char in text) if all(char in table for char in text) else text.encode()
            )
    for token, each in added.items():
        pieces[token] = each.content.encode()
    control = frozenset(token for token, each in added.items() if each.special)
    return Vocabulary(tuple(pieces), control, {each.content: token for token, each in added.items()})
