"""Model families: from an unchanged Hugging Face config.json to a `ModelSpec`.

Owns the list of supported families; a new one is one reader module and one line here. Refuses by name what
no reader supports, rather than running something similar. Called wherever a command takes a model.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from megakernel.config import ConfigError, read_json
from megakernel.families import cohere2_moe, qwen3_moe
from megakernel.families.fields import Fields
from megakernel.model import ModelSpec

__all__ = ["SUPPORTED_FAMILIES", "read_config", "read_model"]

_READERS: Mapping[str, Callable[[Fields], ModelSpec]] = {
    "cohere2_moe": cohere2_moe.read,
    "qwen3_moe": qwen3_moe.read,
}

SUPPORTED_FAMILIES = tuple(sorted(_READERS))


def read_model(path: str | Path) -> ModelSpec:
    """Read a config.json, or the one in a model's directory."""
    # os.path answers False where Path.is_dir raises, so that the reader reports the path.
    is_directory = os.path.isdir(path)  # noqa: PTH112
    return read_config(read_json(Path(path, "config.json") if is_directory else path), str(path))


def read_config(config: Mapping[str, object], source: str = "config") -> ModelSpec:
    """Read the decoded content of a config.json; `source` names it in messages."""
    fields = Fields(config, source)
    supported = ", ".join(SUPPORTED_FAMILIES)
    model_type = config.get("model_type")
    if model_type is None:
        raise ConfigError(f"{source}: `model_type` is missing; supported: {supported}")
    reader = _READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise fields.refusal("model_type", f"one of {supported}")
    return reader(fields)
