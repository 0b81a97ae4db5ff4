"""What a process tells the one that started it: log lines, and how far it has come, each a line of JSON.

Such a line begins with ASCII's record separator, which tells it from whatever else is printed.
"""

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

MARK = "\x1e"


class Relay(logging.Handler):
    """Hands log records on as lines of JSON on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _tell({"level": record.levelno, "message": self.format(record)})
        except Exception:
            self.handleError(record)


def relay_progress(done: int, total: int, values: Mapping[str, float]) -> None:
    """Tells the starter what a ``Progress`` is called with."""
    _tell({"done": done, "total": total, "values": dict(values)})


def understood(line: str) -> dict[str, Any] | None:
    """Returns what ``line`` tells, ``level`` and ``message`` or ``done``, ``total`` and ``values``; None if nothing."""
    if not line.startswith(MARK):
        return None
    try:
        told = json.loads(line[len(MARK) :])
    except ValueError:  # torn by a process that was killed
        return None
    return told if isinstance(told, dict) else None


def _tell(what: dict[str, Any]) -> None:
    sys.stderr.write(f"{MARK}{json.dumps(what)}\n")
    sys.stderr.flush()
