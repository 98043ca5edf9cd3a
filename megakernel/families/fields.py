"""Typed access to the fields of a Hugging Face config.json, for the family readers.

Owns the messages: every refusal names the file, the field, what was found and what is supported. Refuses to
fill in a default on its own: a reader passes one where the family's model class has one that cannot be
misread; null counts as absent. Called by the readers in this package only.
"""

import math
from collections.abc import Mapping, Sequence
from typing import cast

from megakernel.config import ConfigError
from megakernel.config.errors import nearest, shown

# Far above any published model: a slip of the pen is named here instead of filling the memory later.
_LARGEST_INTEGER = 2**31 - 1
_MOST_LAYERS = 1024


class Fields:
    """The fields of one config.json, read by name."""

    def __init__(self, config: Mapping[str, object], source: str) -> None:
        """Hold the decoded file; `source` names it in messages."""
        self._config = config
        self._source = source

    def has(self, name: str) -> bool:
        """Tell whether the field is present with a value; null counts as absent."""
        return self._config.get(name) is not None

    def given(self, name: str) -> bool:
        """Tell whether the field is present, be it null."""
        return name in self._config

    def refusal(self, name: str, needed: str) -> ConfigError:
        """Return the error for a field whose value cannot be used."""
        return self.error(f"`{name}` is {shown(self._config.get(name))}; supported: {needed}")

    def error(self, message: str) -> ConfigError:
        """Return an error about the file as a whole, or about several fields together."""
        return ConfigError(f"{self._source}: {message}")

    def integer(self, name: str, default: int | None = None, *, at_least: int = 1) -> int:
        """Read an integer."""
        needed = f"an integer from {at_least} to {_LARGEST_INTEGER}"
        value = self._value(name, default, needed)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= _LARGEST_INTEGER:
            raise self.refusal(name, needed)
        return value

    def num_layers(self) -> int:
        """Read the number of decoder layers."""
        num_layers = self.integer("num_hidden_layers")
        if num_layers > _MOST_LAYERS:
            raise self.refusal("num_hidden_layers", f"at most {_MOST_LAYERS}")
        return num_layers

    def integer_up_to(self, name: str, limit_name: str, limit: int, default: int | None = None) -> int:
        """Read a count that may not exceed another field's."""
        value = self.integer(name, default, at_least=1 if default is None else 0)
        if value > limit:
            raise self.refusal(name, f"at most `{limit_name}`, which is {limit}")
        return value

    def even(self, name: str) -> int:
        """Read the width of something that RoPE turns in pairs."""
        value = self.integer(name)
        if value % 2:
            raise self.refusal(name, "an even number, as RoPE turns pairs of elements")
        return value

    def divisor(self, name: str, whole_name: str) -> int:
        """Read an integer that divides another field's."""
        value, whole = self.integer(name), self.integer(whole_name)
        if whole % value:
            raise self.refusal(name, f"a divisor of `{whole_name}`, which is {whole}")
        return value

    def number(self, name: str) -> float:
        """Read a positive finite number."""
        return self._positive(name, self._value(name, None, "a positive number"))

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        """Read true or false."""
        value = self._value(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def choice(self, name: str, options: Sequence[str]) -> str:
        """Read one of some words."""
        needed = " or ".join(f'"{each}"' for each in options)
        value = self._value(name, None, needed)
        if not isinstance(value, str) or value not in options:
            raise self.refusal(name, needed)
        return value

    def choices(self, name: str, options: Sequence[str], *, count: int) -> tuple[str, ...]:
        """Read a list with one of some words for each layer."""
        values = self._list(name)
        for position, value in enumerate(values):
            if value not in options:
                needed = " or ".join(f'"{each}"' for each in options)
                raise self.error(f"`{name}.{position}` is {shown(value)}; supported: {needed}")
        if len(values) != count:
            raise self.error(f"`{name}` has {len(values)} entries, but `num_hidden_layers` is {count}")
        return tuple(str(value) for value in values)

    def indices(self, name: str, *, below: int) -> frozenset[int]:
        """Read a list of layer positions; absent or null means none."""
        values = self._list(name) if self.has(name) else []
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
                raise self.error(f"`{name}` holds {shown(value)}; supported: layers 0 to {below - 1}")
        return frozenset(cast("list[int]", values))

    def token_ids(self, name: str, default: Sequence[int]) -> tuple[int, ...]:
        """Read one token id or a list of them; null means none."""
        value = self._config.get(name, list(default))
        values: list[object] = cast("list[object]", value) if isinstance(value, list) else [value]
        values = [] if value is None else values
        if any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in values):
            raise self.refusal(name, "a token id, a list of token ids, or null")
        return tuple(cast("list[int]", values))

    def neutral(self, accepted: Mapping[str, object]) -> None:
        """Refuse each field that is present with any value but the one that leaves the model as it is."""
        for name, value in accepted.items():
            found = self._config.get(name)
            # JSON's 0 and false are different answers, though equal in Python.
            same = found == value and isinstance(found, bool) == isinstance(value, bool)
            if found is not None and not same:
                raise self.refusal(name, "no such field" if value is None else shown(value))

    def rope_theta(self, class_default: float | None = None) -> float:
        """Read the rotary base, at the top level or in `rope_parameters`; refuse every scaling of it.

        `class_default` is a top-level value that the family's class writes without being asked, so that it
        does not contradict `rope_parameters`.
        """
        self._refuse_rope_scaling("rope_scaling")
        self._refuse_rope_scaling("rope_parameters")
        inner = self._table("rope_parameters").get("rope_theta")
        if inner is None:
            return self.number("rope_theta")
        theta = self._positive("rope_parameters.rope_theta", inner)
        if self.has("rope_theta") and self.number("rope_theta") not in (theta, class_default):
            outer = shown(self.number("rope_theta"))
            raise self.error(f"`rope_theta` is {outer}, but `rope_parameters.rope_theta` is {shown(inner)}")
        return theta

    def _refuse_rope_scaling(self, name: str) -> None:
        for key, value in self._table(name).items():
            neutral = {
                "rope_theta": name == "rope_parameters",
                "rope_type": value == "default",
                "type": value == "default",
                "partial_rotary_factor": value == 1.0,
            }.get(key, value is None)
            if not neutral:
                raise self.error(
                    f"`{name}.{key}` is {shown(value)}; supported: plain RoPE over the whole head, "
                    'with "rope_type": "default" and "rope_theta" only'
                )

    def _table(self, name: str) -> Mapping[str, object]:
        value = self._config.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.refusal(name, "an object")
        return cast("Mapping[str, object]", value)

    def _list(self, name: str) -> list[object]:
        value = self._value(name, None, "a list")
        if not isinstance(value, list):
            raise self.refusal(name, "a list")
        return cast("list[object]", value)

    def _positive(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"`{name}` is {shown(value)}; supported: a positive number")
        try:
            number = float(value)
        except OverflowError:  # an integer beyond any float
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            raise self.error(f"`{name}` is {shown(value)}; supported: a positive finite number")
        return number

    def _value(self, name: str, default: object, needed: str) -> object:
        """Return the field, or the default where the field is absent or null."""
        if self.has(name):
            return self._config[name]
        if default is not None:
            return default
        if name in self._config:
            raise self.refusal(name, needed)
        close = nearest(name, self._config)
        hint = "" if close is None else f" (the nearest field in the file is `{close}`)"
        raise self.error(f"`{name}` is missing; needed: {needed}{hint}")
