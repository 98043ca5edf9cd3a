"""Dotted assignments on the command line: `--set memory.hbm_bytes=80000000000`.

Owns their grammar: the key is dotted (numbers index lists), the value is read as TOML, then `null`, then a
plain string. Refuses to guess keys: an unknown one is named together with the nearest known. Called by
the commands, directly or through `load_toml` and `load_json`.
"""

import tomllib
from collections.abc import Iterable
from datetime import date, time
from typing import TypeVar, cast, overload

from pydantic import BaseModel

from megakernel.config.errors import ConfigError, hint, shown
from megakernel.config.explain import dotted
from megakernel.config.frozen import parse

Model = TypeVar("Model", bound=BaseModel)


@overload
def override(value: Model, assignments: Iterable[str]) -> Model: ...
@overload
def override(value: dict[str, object], assignments: Iterable[str]) -> dict[str, object]: ...
def override(value: BaseModel | dict[str, object], assignments: Iterable[str]) -> BaseModel | dict[str, object]:
    """Return `value` with `a.b=c` assignments applied; a model is validated again, a dict keeps its keys."""
    wanted = tuple(assignments)
    if isinstance(value, BaseModel):
        changed = assign(value.model_dump(mode="json"), wanted)
        return parse(changed, type(value), _source(wanted)) if wanted else value
    return assign(value, wanted, new_keys=False)


def assign(data: dict[str, object], assignments: Iterable[str], *, new_keys: bool = True) -> dict[str, object]:
    """Return a copy of plain data with the assignments applied; with `new_keys` a later check knows keys."""
    changed = data
    for text in assignments:
        keys, value = _split(text)
        try:
            changed = cast("dict[str, object]", _with(changed, keys, 0, value, new_keys=new_keys))
        except ConfigError as error:
            raise ConfigError(f"--set {text}: {error}") from None
    return changed


def _source(assignments: tuple[str, ...]) -> str:
    return " ".join(f"--set {text}" for text in assignments)


def _split(text: str) -> tuple[list[str], object]:
    key, equals, raw = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: an assignment is written key=value or a.b=value")
    return keys, _value(raw.strip())


def _value(raw: str) -> object:
    if raw == "null":  # TOML has no word for it, and optional keys need one
        return None
    try:
        table: dict[str, object] = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    # A newline in the text could smuggle in a second key, and no key takes a date: both are strings.
    value = table["value"]
    return raw if len(table) != 1 or isinstance(value, (date, time)) else value


def _with(node: object, keys: list[str], depth: int, value: object, *, new_keys: bool) -> object:
    """Return a copy of `node` with the value put at `keys[depth:]`; the original stays as it was."""
    if depth == len(keys):
        return value
    name, key = keys[depth], dotted(keys[: depth + 1])
    match node:
        case dict():
            table = dict(cast("dict[str, object]", node))
            if name not in table and not new_keys:
                raise ConfigError(f"unknown key `{key}`" + hint(name, table))
            child: object = table.get(name)
            if child is None:  # an absent table is begun; validation asks for the rest of it
                child = dict[str, object]()
            table[name] = _with(child, keys, depth + 1, value, new_keys=new_keys)
            return table
        case list() | tuple():
            items = list(cast("list[object]", node))
            if not name.isdecimal() or int(name) >= len(items):
                size = f"a list of {len(items)} (0 to {len(items) - 1})" if items else "an empty list"
                raise ConfigError(f"`{key}` is no position in {size}")
            items[int(name)] = _with(items[int(name)], keys, depth + 1, value, new_keys=new_keys)
            return items
        case _:
            raise ConfigError(f"`{key}` lies below {shown(node)}, which has no keys")
