"""The base of every model that data enters through, and its validation with messages for people.

Owns `Frozen` (immutable, unknown keys refused, no silent conversion) and `parse`, which turns plain data
into such a model or one `ConfigError`. Refuses aliases and mutable defaults: a key has exactly one name.
Called by the readers of this package and by everything that holds already decoded data.
"""

import json
import math
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from megakernel.config.errors import ConfigError, shown
from megakernel.config.explain import explain, quoted

Model = TypeVar("Model", bound=BaseModel)


class Frozen(BaseModel):
    """Immutable validated value: an int is not taken from "3" or 3.0, and infinities are refused.

    Lists of JSON and TOML become tuples when they come through `parse` or a reader; code that builds a
    model directly passes tuples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def parse(data: object, model: type[Model], source: str) -> Model:
    """Validate plain data (what JSON or TOML can hold) as `model`; `source` names it in the message."""
    plain = _plain(data, (), source)
    # Strict validation of *JSON* is the mode wanted here: lists become tuples, strings become enums, and
    # still no int is made from a string.
    text = json.dumps(plain, allow_nan=False)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(explain(error, model, plain, source)) from None


def _plain(value: object, where: tuple[str | int, ...], source: str) -> object:
    """Return `value` with only JSON types in it; refuse what JSON cannot hold, by key."""
    match value:
        case None | bool() | int():
            return value
        case float():
            if math.isfinite(value):
                return value
            raise ConfigError(f"{source}: {quoted(where)} is {value}; a finite number is needed")
        case str():
            if any("\ud800" <= char <= "\udfff" for char in value):
                raise ConfigError(f"{source}: {quoted(where)} holds a lone surrogate, which is not text")
            return value
        case dict():
            return _plain_table(value, where, source)  # pyright: ignore[reportUnknownArgumentType]
        case list() | tuple():
            items: list[object] = list(value)  # pyright: ignore[reportUnknownArgumentType]
            return [_plain(item, (*where, index), source) for index, item in enumerate(items)]
        case _:
            kind = type(value).__name__
            raise ConfigError(f"{source}: {quoted(where)} is a {kind} ({shown(value)}), which no key takes")


def _plain_table(table: dict[object, object], where: tuple[str | int, ...], source: str) -> dict[str, object]:
    plain: dict[str, object] = {}
    for key, item in table.items():
        if not isinstance(key, str):
            raise ConfigError(f"{source}: key {shown(key)} under {quoted(where)} is not a string")
        _plain(key, (*where, key), source)
        plain[key] = _plain(item, (*where, key), source)
    return plain
