"""Finds the files that ship with the code: `configs/` and `csrc/`.

Owns one rule. In a clone (or an editable install) they lie beside the packages; in an installed wheel they
lie inside this package, under `_assets`. `locate` applies it to a path given by a user: a path that exists is
taken as it is, and a relative one that does not is looked up among the shipped files, so that
`configs/search/x.toml` means the same in any directory. Paths *inside* a file never come here: they are
relative to that file. Called by the commands and by whatever compiles csrc.
"""

import os
from pathlib import Path

from megakernel.config import ConfigError
from megakernel.config.errors import hint

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL = _PACKAGE / "_assets"
_ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent


def asset(relative: str) -> Path:
    """Return the path of a shipped file or directory, named as in a clone: `configs/models/x.json`."""
    path = _ROOT / relative
    if not path.exists():
        raise ConfigError(f"{relative}: not among the files shipped with this version, in {_ROOT}")
    return path


def locate(given: str | Path) -> Path:
    """Return the file a user means: the path itself if it exists, else the shipped file of that name.

    Any other path comes back as given, so that its reader reports it under the user's own name.
    """
    path = Path(given)
    # os.path answers False where Path.exists raises: a name too long, a directory that may not be searched.
    exists = os.path.exists(given)  # noqa: PTH110
    if exists or path.parts[:1] not in (("configs",), ("csrc",)) or ".." in path.parts:
        return path
    shipped = _ROOT / path
    if not os.path.exists(shipped):  # noqa: PTH110
        names = [each.name for each in shipped.parent.iterdir()] if shipped.parent.is_dir() else []
        near = hint(path.name, names, what="shipped there")
        raise ConfigError(f"{given}: no such file, neither here nor shipped{near}")
    return shipped
