"""One text per value: canonical JSON, the digest of it, and the readable form for files.

Owns what a digest means: equal values have equal digests on every machine and Python version. Refuses
values without one JSON form (sets, NaN, keys that are not strings), because that is our own mistake.
Called by plans, tables, measurements and whatever else names data by content.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import cast

from pydantic import BaseModel


def canonical_json(value: object) -> str:
    """Return the one compact JSON text of a model, dataclass or plain value: sorted keys, ASCII."""
    return json.dumps(_jsonable(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def pretty_json(value: object) -> str:
    """Return indented JSON for a file that people also read, keys in declared order, newline at the end."""
    return json.dumps(_jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def digest(value: object) -> str:
    """Return "sha256:..." of bytes as they are, or of any other value's canonical JSON."""
    raw = value if isinstance(value, bytes) else canonical_json(value).encode()
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def _jsonable(value: object) -> object:
    match value:
        case Enum():  # before int and str: an IntEnum or StrEnum is written as its plain value
            return _jsonable(value.value)
        case None | bool() | int() | float() | str():
            return value
        case BaseModel():
            return _jsonable(value.model_dump(mode="json"))
        case list() | tuple():
            return [_jsonable(item) for item in cast("tuple[object, ...]", value)]
        case Mapping():
            return _jsonable_table(cast("Mapping[object, object]", value))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {each.name: _jsonable(getattr(value, each.name)) for each in dataclasses.fields(value)}
        case _:
            raise TypeError(f"a {type(value).__name__} has no canonical JSON form: {value!r}")


def _jsonable_table(table: Mapping[object, object]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for key, item in table.items():
        if not isinstance(key, str):
            raise TypeError(f"canonical JSON needs string keys, got {key!r}")
        plain[key] = _jsonable(item)
    return plain
