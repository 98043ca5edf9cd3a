"""Structured logs: one JSON object a line on stderr. Owns the format; no log holds prompts, outputs or keys."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Writes a record and whatever was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        seconds, fraction = divmod(record.created, 1)
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(fraction * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD and value is not None}
        if record.exc_info and record.exc_info[0] is not None:
            line["trace"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def trace(error: BaseException) -> dict[str, str]:
    """Return what a log may say of an error that a request met: kind and place, but no message, which may quote."""
    return {"error": type(error).__name__, "trace": "".join(traceback.format_tb(error.__traceback__))}


def start_logging(level: int = logging.INFO) -> None:
    """Send all logs to stderr as JSON, those of libraries too; uvicorn's access log is off, ours says more."""
    from transformers.utils import logging as library  # noqa: PLC0415 - it brings torch along

    library.disable_default_handler()
    library.enable_propagation()
    logging.captureWarnings(capture=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != "uvicorn.access"
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
