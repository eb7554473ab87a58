"""Logging of the server's process: one line per event, on standard error."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Collection
from typing import Any

from tpu_serve.config import ServerConfig
from tpu_serve.server.context import current_request_id


def configure_logging(config: ServerConfig | str) -> None:
    """Sends this package's messages and the access lines to standard error; others' only from warnings on.

    Args:
      config: of a server, or the least severe level alone.
    """
    if isinstance(config, str):
        config = ServerConfig(log_level=config)
    number = _number(config.log_level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("tpu_serve").setLevel(number)
    logging.captureWarnings(config.log_format == "json")
    http = number if config.uvicorn_log_level is None else _number(config.uvicorn_log_level)
    access = logging.getLogger("uvicorn.access")
    access.setLevel(http)
    access.disabled = config.disable_access_log
    access.filters = [] if http <= logging.DEBUG else [_IsWorthALine(config.disable_access_log_for_endpoints)]
    # Its start-up lines come before the model is loaded and would say that the server is ready.
    logging.getLogger("uvicorn.error").setLevel(http if http <= logging.DEBUG else max(http, logging.WARNING))


class TextFormatter(logging.Formatter):
    """Level, time and message, the traceback behind it."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S")


class JsonFormatter(logging.Formatter):
    """One JSON object in one line.

    It has `time` (UTC), `level`, `logger` and `message`; `request_id` while a request is worked for; `exception` with the traceback as
    text; and `client`, `method`, `path` and `status` of an access line.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := current_request_id()) is not None:
            entry["request_id"] = request_id
        if (access := _access(record)) is not None:
            entry |= access
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        return json.dumps(entry)


class _IsWorthALine(logging.Filter):
    """Access lines of paths that machines ask for every few seconds are not.

    Args:
      quiet_paths: those, without a slash at the end.
    """

    def __init__(self, quiet_paths: Collection[str]):
        super().__init__()
        self._quiet = frozenset(path.rstrip("/") for path in quiet_paths)

    def filter(self, record: logging.LogRecord) -> bool:
        access = _access(record)
        return access is None or access["path"].split("?")[0].rstrip("/") not in self._quiet


def _access(record: logging.LogRecord) -> dict[str, Any] | None:
    """What an access line of uvicorn carries: client, method, path, HTTP version and status."""
    if record.name != "uvicorn.access" or not isinstance(record.args, tuple) or len(record.args) != 5:
        return None
    client, method, path, _, status = record.args
    return {"client": str(client), "method": str(method), "path": str(path), "status": status}


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def shown_prompt(body: Any, most: int) -> str:
    """The beginning of what a request asks, for the log: `most` characters of its prompt or messages as they were sent."""
    asked = (
        next((body[name] for name in ("prompt", "messages", "input") if name in body), "")
        if isinstance(body, dict)
        else ""
    )
    text = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)
    return repr(text[:most] + "…" if len(text) > most else text)
