"""What an operator may set about a server: one TOML file, or flags of the same names.

Owns names, defaults and bounds. Paths inside a file are relative to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megakernel.config import Frozen, parse, read_toml
from runtime.server.fields import MOST_BIASES

_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://[^/]+)$"
"""As browsers send it, without a path: nothing else would ever match."""


class Limits(Frozen):
    """What one request, or one key, may ask for; sizes are checked before anything is computed.

    `body_objects` counts lists too. `grammar_bytes` and `grammar_rules` are those of grammars, expressions and choices,
    `template_bytes` of chat_template_kwargs.
    """

    body_bytes: int = Field(default=4 * 2**20, gt=0)
    body_objects: int = Field(default=2**15, gt=0)
    messages: int = Field(default=4096, gt=0)
    prompts: int = Field(default=64, gt=0)
    tools: int = Field(default=512, gt=0)
    schema_bytes: int = Field(default=512 * 2**10, gt=0)
    schema_depth: int = Field(default=32, gt=0, le=100)
    schema_properties: int = Field(default=1000, gt=0)
    grammar_bytes: int = Field(default=32 * 2**10, gt=0)
    grammar_rules: int = Field(default=500, gt=0)
    template_bytes: int = Field(default=64 * 2**10, gt=0)
    stops: int = Field(default=16, ge=0)
    stop_chars: int = Field(default=1024, gt=0)
    stop_token_ids: int = Field(default=128, ge=0)
    logit_biases: int = Field(default=1024, ge=0, le=MOST_BIASES)
    bad_words: int = Field(default=128, ge=0)
    choices: int = Field(default=16, gt=0)
    logprobs: int = Field(default=20, ge=0)
    output_tokens: int | None = Field(default=None, gt=0)
    requests_per_key: int | None = Field(default=None, gt=0)


class Waits(Frozen):
    """Seconds. `first_token_s` includes the queue; `drain_s` is how long running requests may go on after SIGTERM.

    `stalled_s`: how long a client may read nothing of its stream. `form_s`: how long a grammar may take to be built.
    """

    first_token_s: float = Field(default=600.0, gt=0)
    total_s: float = Field(default=3600.0, gt=0)
    keep_alive_s: float = Field(default=15.0, gt=0)
    stalled_s: float = Field(default=60.0, gt=0)
    form_s: float = Field(default=10.0, gt=0)
    drain_s: float = Field(default=30.0, ge=0)


class ServeConfig(Frozen):
    """A server. Without `model` it serves the built-in demo model.

    At most `max_num_seqs` requests run at once, on `num_gpu_blocks` KV blocks of `block_size` tokens, or as many as
    `kv_cache_memory_bytes` hold. Keys: one a line in `api_key_file` and `admin_key_file`, read again when the files
    change; COUNTERPOINT_API_KEY and COUNTERPOINT_ADMIN_KEY in the environment hold more, separated by commas. Without
    any key every client may come. `plan` is a file of `tuner search` for this model, whose buckets bound
    `max_num_seqs` and `max_model_len`.

    `device` auto is a card where one can be used. `load_format` dummy draws the weights, for measuring: the folder
    needs none. `gpu_memory_utilization` is the share of a card that weights, scratch and KV may take.
    """

    model: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    plan: str | None = None
    served_model_name: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    chat_template: str | None = None
    parser: str = "auto"
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_key_file: str | None = None
    open_metrics: bool = False
    allowed_origins: tuple[Annotated[str, Field(pattern=_ORIGIN)], ...] = ()
    reasoning_fields: tuple[str, ...] = ("reasoning", "reasoning_content")
    max_model_len: int | None = Field(default=None, gt=0)
    max_num_seqs: int = Field(default=8, gt=0)
    block_size: int = Field(default=64, gt=0)
    num_gpu_blocks: int | None = Field(default=None, gt=0)
    kv_cache_memory_bytes: int = Field(default=2 * 2**30, gt=0)
    max_waiting: int = Field(default=256, ge=0)
    enable_prefix_caching: bool = True
    limits: Limits = Limits()
    waits: Waits = Waits()


_PATHS = ("model", "plan", "chat_template", "api_key_file", "admin_key_file")


def load_config(path: Path, flags: dict[str, object]) -> ServeConfig:
    """Read a TOML file; `flags` that are not None win over it."""
    data = read_toml(path)
    for name in _PATHS:
        if isinstance(data.get(name), str):
            data[name] = str(path.parent / str(data[name]))
    return make_config(data, flags, str(path))


def make_config(data: dict[str, object], flags: dict[str, object], source: str = "the command line") -> ServeConfig:
    """Validate plain data, overruled by the flags that were given."""
    return parse(data | {name: value for name, value in flags.items() if value is not None}, ServeConfig, source)
