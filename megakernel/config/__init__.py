"""How data enters and leaves the project: frozen models, one error type, and files.

Owns the rules for every file that people or machines write: TOML and JSON are read into frozen pydantic
models, unknown keys are refused with the nearest known one, and output files appear whole or not at all.
Refuses to know what any particular file means. Called by every command and by the models of this package.
"""

from megakernel.config.canonical import canonical_json, digest, pretty_json
from megakernel.config.errors import ConfigError
from megakernel.config.frozen import Frozen, parse
from megakernel.config.override import override
from megakernel.config.read import load_json, load_toml, read_json, read_toml
from megakernel.config.write import check_writable, write_text_atomic

__all__ = [
    "ConfigError",
    "Frozen",
    "canonical_json",
    "check_writable",
    "digest",
    "load_json",
    "load_toml",
    "override",
    "parse",
    "pretty_json",
    "read_json",
    "read_toml",
    "write_text_atomic",
]
