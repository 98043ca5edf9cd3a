"""The one error that bad user input becomes, and the hints that go into its message.

Owns the wording shared by all readers: how a value is shown and how a near miss is suggested. Refuses to
print or to exit: a command's `main` turns the error into `error: <message>` and exit code 2.
"""

import difflib
import json
from collections.abc import Iterable

_SHOWN_CHARS = 60
_LISTED_NAMES = 12


class ConfigError(Exception):
    """Bad input from outside: what was found, what was needed, and which file or key to change."""


def shown(value: object) -> str:
    """Render a value found in a file, short enough for one line of a message."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, if any is similar enough to be meant."""
    by_folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    # cutoff 0.5 still catches a forgotten unit suffix: "latency" for "latency_ns".
    found = difflib.get_close_matches(name.casefold(), list(by_folded), n=1, cutoff=0.5)
    return by_folded[found[0]] if found else None


def hint(name: str, known: Iterable[str], *, what: str = "known here") -> str:
    """Return a suffix for 'unknown NAME': the nearest known name, or the list of them when short."""
    names = sorted(set(known))
    close = nearest(name, names)
    if close is not None:
        return f"; did you mean `{close}`?"
    if not names:
        return ""
    listed = ", ".join(f"`{each}`" for each in names[:_LISTED_NAMES])
    more = f", and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
    return f"; {what}: {listed}{more}"
