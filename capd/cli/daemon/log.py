"""The log of the daemon on stderr: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Literal

__all__ = ["JsonFormatter", "start_log"]

logger = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """Formats an entry as one line of JSON: time (UTC, RFC 3339), level, logger, thread, pid, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, in ASCII."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def start_log(level: int, form: Literal["text", "json"]) -> None:
    """Send all log entries from `level` on to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s capd %(levelname)s %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler])
    threading.excepthook = _log_end


def _log_end(args: threading.ExceptHookArgs) -> None:
    """Log an exception that ends a thread, which would otherwise stand between the entries as plain text."""
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = "?" if args.thread is None else args.thread.name
        logger.critical("the thread %s ended", name, exc_info=args.exc_value)
