"""The slow path that fast ones must equal: a packed table executed with torch on the CPU, in any legal interleaving."""

from runtime.reference.interpreter import Interpreter, StuckError
from runtime.reference.memory import Memory

__all__ = ["Interpreter", "Memory", "StuckError"]
