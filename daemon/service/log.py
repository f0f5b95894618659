"""Log records on standard error: one line each, as text for people or JSON for programs. Built on `logging`.

    log = logging.getLogger("sluice.engine")
    log.info("request finished", extra={"fields": {"id": "cmpl-1", "tokens": 17}})

Text from outside (prompts never, names and paths yes) cannot start a line of its own: control characters are escaped.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from sluice.daemon.service.settings import LogSettings

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
_ESCAPES = {code: f"\\x{code:02x}" for code in [*range(32), 127, 0x2028, 0x2029]} | {10: "\\n", 13: "\\r", 9: "\\t"}


def _one_line(text: str) -> str:
    return text.translate(_ESCAPES)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return dict(fields) if isinstance(fields, Mapping) else {}


def _name(record: logging.LogRecord) -> str:
    return record.name.removeprefix("sluice.")


class TextFormatter(logging.Formatter):
    """ "2026-01-31T12:00:00.123Z info engine: message key=value"; under the journal a priority in place of the time."""

    def __init__(self, journal: bool = False) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        level = _NAMES.get(record.levelno, "error")
        if self._journal:
            priority = {"debug": 7, "info": 6, "warning": 4}.get(level, 3)
            head = f"<{priority}>{_name(record)}: "
        else:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            head = f"{stamp}.{int(record.msecs):03d}Z {level} {_name(record)}: "
        line = head + _one_line(record.getMessage())
        for key, value in _fields(record).items():
            text = str(value)
            quoted = not text or any(char in text for char in ' ="')
            line += f" {key}={json.dumps(text) if quoted else _one_line(text)}"
        if record.exc_info:
            line += " exception=" + json.dumps(self.formatException(record.exc_info))
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object: time, level, name, message, then the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": _NAMES.get(record.levelno, "error"),
            "name": _name(record),
            "message": record.getMessage(),
        }
        entry.update({key: value for key, value in _fields(record).items() if key not in entry})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def under_journal(env: Mapping[str, str], stream: TextIO) -> bool:
    """Whether `stream` is the journal's own (JOURNAL_STREAM names its device and inode)."""
    try:
        info = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return env.get("JOURNAL_STREAM") == f"{info.st_dev}:{info.st_ino}"


def setup_logging(settings: LogSettings, stream: TextIO | None = None, env: Mapping[str, str] | None = None) -> None:
    """Sends every record of `sluice.*` (and warnings of anything else) to `stream`, standard error by default.

    May be called again, at reload: the new level and format replace the old ones.
    """
    stream = stream or sys.stderr
    env = os.environ if env is None else env
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        JsonFormatter() if settings.format == "json" else TextFormatter(journal=under_journal(env, stream))
    )
    root = logging.getLogger()
    for old in [h for h in root.handlers if getattr(h, "sluice", False)]:
        root.removeHandler(old)
    handler.sluice = True  # type: ignore[attr-defined]  # our mark, so that a second call replaces only our own
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("sluice").setLevel(LEVELS[settings.level])
