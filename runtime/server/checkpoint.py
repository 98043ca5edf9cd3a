"""What a checkpoint folder says about text: tokenizer, template, end tokens, default sampling, context window."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from megakernel.config import ConfigError, read_json
from runtime.parsing import choose_dialect
from runtime.server.config import ServeConfig
from runtime.server.service import TextSide
from runtime.server.template import ChatTemplate
from runtime.server.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_text(folder: Path, config: ServeConfig) -> TextSide:
    """Read a checkpoint's text side; ConfigError where something needed is missing."""
    model = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    vocab_size, window = (_integer(model, name, folder) for name in ("vocab_size", "max_position_embeddings"))
    tokenizer = TextTokenizer.load(folder)
    override = Path(config.chat_template) if config.chat_template else None
    template = ChatTemplate.load(folder, tokenizer, override)
    if template is None:
        raise ConfigError(
            f"{folder}: has no chat template; needed: chat_template.jinja, or `chat_template` in the config"
        )
    log.info("chat template chosen", extra={"origin": template.origin})
    max_model_len = config.max_model_len or window
    if max_model_len > window:
        raise ConfigError(f"`max_model_len` is {max_model_len}; the model's window is {window}")
    if tokenizer.size > vocab_size:
        raise ConfigError(f"{folder}: the tokenizer has {tokenizer.size} ids, the model {vocab_size}")
    return TextSide(
        names=config.served_model_name or (folder.resolve().name,),
        tokenizer=tokenizer,
        template=template,
        dialect=choose_dialect(config.parser, tokenizer.vocabulary),
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        end_ids=frozenset([*_ids(generation.get("eos_token_id")), *_ids(model.get("eos_token_id"))]),
        defaults=_sampling_defaults(generation),
    )


def _integer(model: dict[str, Any], name: str, folder: Path) -> int:
    value = model.get(name)
    if not isinstance(value, int):
        raise ConfigError(f"{folder / 'config.json'}: `{name}` is {value!r}; needed: an integer")
    return value


def _ids(value: object) -> list[int]:
    """End ids: a number, a list of numbers, or nothing."""
    found = cast("list[object]", value) if isinstance(value, list) else [value]
    return [each for each in found if isinstance(each, int)]


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    found = {name: generation[name] for name in _DEFAULTS if isinstance(generation.get(name), (int, float))}
    return {"temperature": 0.0} | found if generation.get("do_sample") is False else found
