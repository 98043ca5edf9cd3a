"""The serving engine: continuous batching over paged KV, behind one step interface to whatever computes."""

from runtime.engine.async_engine import AsyncEngine, OutputStream
from runtime.engine.core import EngineCore
from runtime.engine.listener import Listener, RequestTimes, StepTimes
from runtime.engine.scripted import ScriptedBackend, replies
from runtime.engine.settings import EngineSettings

__all__ = [
    "AsyncEngine",
    "EngineCore",
    "EngineSettings",
    "Listener",
    "OutputStream",
    "RequestTimes",
    "ScriptedBackend",
    "StepTimes",
    "replies",
]
