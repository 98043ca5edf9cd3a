"""Runs a command that does not outlive whoever asked for it: `python leash.py COMMAND ...`, in a session of its own.

A card that is still held by the command of a search that was killed would disturb the times of the one that goes on.
Standard input ends when the asker does, however that ended; then everything that the command started is killed.
Imports nothing of this project. Called by `measure.py`.
"""

import os
import signal
import subprocess
import sys
from threading import Thread

CANNOT_RUN = 126
"""Exit code of a shell for what is there and can't be run."""


def main(command: list[str]) -> int:
    """Exit code of the command, 128 and the signal where one ended it, as shells say it."""
    Thread(target=_watch, daemon=True).start()
    try:
        code = subprocess.call(command, stdin=subprocess.DEVNULL)  # noqa: S603 - the user's command
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return CANNOT_RUN
    return code if code >= 0 else 128 - code


def _watch() -> None:
    os.read(sys.stdin.fileno(), 1)  # of nothing that is ever written
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
