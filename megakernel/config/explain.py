"""Turns pydantic's list of validation errors into one message with dotted keys.

Owns the translation only: which key, what was found, what was needed, and the nearest known key. Refuses
to read files. Called by `parse` in frozen.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megakernel.config.errors import hint, nearest, shown

_Location = tuple[str | int, ...]


def dotted(where: Sequence[str | int]) -> str:
    """Return the way a key is written in messages and in `--set`: `layers.0.window_tokens`."""
    return ".".join(str(part) for part in where)


def quoted(where: Sequence[str | int]) -> str:
    """Return a dotted key as messages show it, or words for the document itself."""
    return f"`{dotted(where)}`" if where else "the top level"


def explain(error: ValidationError, model: type[BaseModel], data: object, source: str) -> str:
    """Return one message that names every wrong key of `data` once, under the name of its file."""
    wrong: dict[_Location, list[str]] = defaultdict(list)
    missing: list[_Location] = []
    unknown: list[ErrorDetails] = []
    for detail in error.errors(include_url=False):
        where = _location(detail, data)
        match detail["type"]:
            case "missing":
                missing.append(where)
            case "extra_forbidden":
                unknown.append(detail)
            case _:
                wrong[where] += [_needed(detail)]
    lines = [_unknown_key(detail, model, data, missing) for detail in unknown]
    lines += [f"{quoted(where)} is missing" for where in missing]
    lines += [_wrong_value(where, needs, data) for where, needs in wrong.items()]
    return f"{source}: {lines[0]}" if len(lines) == 1 else f"{source}:\n  " + "\n  ".join(lines)


def _unknown_key(detail: ErrorDetails, model: type[BaseModel], data: object, missing: list[_Location]) -> str:
    """Describe an unknown key; one that misspells a missing key is taken off `missing`, to be told once."""
    where = _location(detail, data)
    absent = {str(each[-1]): each for each in missing if each[:-1] == where[:-1]}
    close = nearest(str(where[-1]), absent)
    if close is not None:
        missing.remove(absent[close])
        return f"unknown key {quoted(where)}; did you mean `{close}`?"
    return f"unknown key {quoted(where)}" + hint(str(where[-1]), known_keys(model, detail["loc"][:-1]))


def _wrong_value(where: _Location, needs: list[str], data: object) -> str:
    if not where:  # a rule about the document as a whole: its message names the keys
        return " and ".join(needs)
    value = data
    for part in where:
        value = _child(value, part)[1]
    found = "" if isinstance(value, (dict, list)) else f", found {shown(value)}"
    return f"{quoted(where)} " + " or ".join(dict.fromkeys(needs)) + found


def _needed(detail: ErrorDetails) -> str:
    message = detail["msg"]
    if detail["type"] in ("value_error", "assertion_error"):
        return message.partition(", ")[2] or message
    if detail["type"] == "union_tag_not_found":
        return f"needs the key {detail.get('ctx', {}).get('discriminator')}"
    for prefix, ours in (("Input should be ", "must be "), ("Input should ", "must "), ("Input ", "")):
        if message.startswith(prefix):
            return ours + message.removeprefix(prefix)
    return message[:1].lower() + message[1:]


def _location(detail: ErrorDetails, data: object) -> _Location:
    """Return the error's location without the union tags that pydantic mixes in, which no file contains."""
    where: list[str | int] = []
    node = data
    last = len(detail["loc"]) - 1
    for position, part in enumerate(detail["loc"]):
        inside, child = _child(node, part)
        if inside:
            node = child
        elif not (position == last and detail["type"] == "missing"):
            continue
        where.append(part)
    return tuple(where)


def _child(node: object, part: str | int) -> tuple[bool, object]:
    if isinstance(node, dict):
        table = cast("Mapping[str | int, object]", node)
        return part in table, table.get(part)
    if isinstance(node, list) and isinstance(part, int):
        items = cast("Sequence[object]", node)
        return part < len(items), items[part] if part < len(items) else None
    return False, None


def known_keys(model: type[BaseModel], where: _Location) -> set[str]:
    """Return the keys that `model` knows at a location, following unions by their tag."""
    models = [model]
    for part in where:
        if isinstance(part, int):
            continue
        below = [inner for outer in models for inner in _models_in(_annotation(outer, part))]
        tagged = [candidate for candidate in models if _has_tag(candidate, part)]
        models = below or tagged or models
    return {name for candidate in models for name in candidate.model_fields}


def _annotation(model: type[BaseModel], name: str) -> Any:  # noqa: ANN401 - a type annotation is any object
    field = model.model_fields.get(name)
    return None if field is None else field.annotation


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401 - a type annotation is any object
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _has_tag(model: type[BaseModel], tag: str) -> bool:
    return any(tag in get_args(field.annotation) for field in model.model_fields.values())
