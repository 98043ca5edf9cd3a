"""Reads a TOML or JSON file into plain data or a frozen model.

Owns every way in which reading can fail, each as one `ConfigError` that starts with the path: absent,
a directory, unreadable, not UTF-8, malformed, a key twice, a number that is none. Refuses to look anywhere
but at the path given; finding shipped files is the business of megakernel/assets.py.
"""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, cast

from megakernel.config.errors import ConfigError, nearest
from megakernel.config.frozen import Model, parse
from megakernel.config.override import assign


def load_toml(path: str | Path, model: type[Model], overrides: Iterable[str] = ()) -> Model:
    """Read a TOML file as `model`; `overrides` are `--set` assignments applied before validation."""
    return _load(read_toml(path), model, path, tuple(overrides))


def load_json(path: str | Path, model: type[Model], overrides: Iterable[str] = ()) -> Model:
    """Read a JSON file as `model`; `overrides` are `--set` assignments applied before validation."""
    return _load(read_json(path), model, path, tuple(overrides))


def read_toml(path: str | Path) -> dict[str, object]:
    """Read a TOML file as plain data."""
    text = _read_text(Path(path))
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a configuration") from None
    except ValueError as error:  # TOMLDecodeError, and integers beyond Python's digit limit
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def read_json(path: str | Path) -> dict[str, object]:
    """Read a JSON file that holds an object as plain data; a key may not appear twice."""
    text = _read_text(Path(path))
    try:
        data: object = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a configuration") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ConfigError(f"{path}: not valid JSON: {error.msg} at {where}") from None
    except ValueError as error:  # from the two hooks below, and integers beyond Python's digit limit
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a JSON {_json_kind(data)} at the top level; an object is needed")
    return cast("dict[str, object]", data)


def _load(data: dict[str, object], model: type[Model], path: str | Path, overrides: tuple[str, ...]) -> Model:
    # A wrong key may come from the file or from the flags, so a message names both.
    source = " ".join([str(path), *(f"--set {text}" for text in overrides)])
    return parse(assign(data, overrides), model, source)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_file_hint(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; a file is needed") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    try:
        # Some editors begin a file with a byte order mark; it says nothing, so it is dropped.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _file_hint(path: Path) -> str:
    try:
        close = nearest(path.name, [each.name for each in path.parent.iterdir() if each.is_file()])
    except OSError:
        return ""
    return "" if close is None else f"; did you mean `{path.with_name(close)}`?"


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key `{next(key for key in keys if keys.count(key) > 1)}` appears twice")
    return table


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _json_kind(data: object) -> str:
    match data:
        case list():
            return "array"
        case str():
            return "string"
        case None | bool():
            return "literal"
        case _:
            return "number"
