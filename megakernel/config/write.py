"""Writes result files whole or not at all.

Owns the atomic write and the check that an output can be written, made before minutes of work rather than
after. Refuses to create directories: a mistyped folder is reported. Called by commands with an output flag.
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Generator
from pathlib import Path

from megakernel.config.errors import ConfigError


def check_writable(path: str | Path) -> None:
    """Raise a `ConfigError` now if `write_text_atomic` to this path would fail later."""
    with _reported(path):
        target = _target(path)
        if _is_stream(path):
            return
        descriptor, temporary = _open_beside(target)
        os.close(descriptor)
        temporary.unlink()


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write UTF-8 text so that readers see the old file or the whole new one, never a part."""
    with _reported(path):
        target = _target(path)
        if _is_stream(path):  # /dev/null, a pipe: renaming over it would replace the device itself
            Path(path).write_text(text, encoding="utf-8")
            return
        descriptor, temporary = _open_beside(target)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _reported(path: str | Path) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot be written: {reason}") from None


def _target(path: str | Path) -> Path:
    """Return the file behind the path (links followed), after the checks that need no write."""
    target = Path(os.path.realpath(path))
    if str(path) == "" or target.is_dir():
        raise ConfigError(f"{path or '(empty path)'}: is a directory; a file name is needed")
    if not target.parent.is_dir() and not _is_stream(path):
        missing = "is not a directory" if target.parent.exists() else "does not exist"
        raise ConfigError(f"{path}: cannot be written: the directory {target.parent} {missing}")
    if target.exists() and not os.access(target, os.W_OK):
        raise ConfigError(f"{path}: cannot be written: the existing file is read-only")
    with contextlib.suppress(FileNotFoundError):
        target.lstat()  # raises for a name that the file system cannot hold
    return target


def _is_stream(path: str | Path) -> bool:
    given = Path(path)
    # /dev/stdout may lead to a regular file that the shell holds open, so its name decides as well.
    return str(given).startswith(("/dev/std", "/dev/fd/", "/proc/")) or (given.exists() and not given.is_file())


def _open_beside(target: Path) -> tuple[int, Path]:
    # tempfile would make the file private to its owner; os.open lets the user's umask decide as usual.
    for attempt in itertools.count():
        temporary = target.parent / f".counterpoint-{os.getpid()}-{attempt}.tmp"
        with contextlib.suppress(FileExistsError):
            return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), temporary
    raise AssertionError
