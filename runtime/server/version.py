"""The version of this program."""

import importlib.metadata


def version() -> str:
    """Return the installed version; a clone that is not installed has none."""
    try:
        return importlib.metadata.version("counterpoint")
    except importlib.metadata.PackageNotFoundError:
        return "0+clone"
