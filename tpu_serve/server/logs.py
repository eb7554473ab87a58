"""Logging of the server's process: one line per event, on standard error."""

from __future__ import annotations

import logging
import sys

QUIET_PATHS = ("/health", "/ping", "/metrics", "/metrics/", "/load")
"""Asked for every few seconds by machines; their access lines are shown at debug only."""


class _IsWorthALine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Access records carry (client, method, path, HTTP version, status)."""
        path = str(record.args[2]) if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        return path.split("?")[0] not in QUIET_PATHS


def configure_logging(level: str) -> None:
    """Sends this package's messages and the access lines to standard error; others' only from warnings on."""
    number = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("tpu_serve").setLevel(number)
    access = logging.getLogger("uvicorn.access")
    access.setLevel(number)
    access.filters = [] if number <= logging.DEBUG else [_IsWorthALine()]
    # Its start-up lines come before the model is loaded and would say that the server is ready.
    logging.getLogger("uvicorn.error").setLevel(
        logging.INFO if number <= logging.DEBUG else max(number, logging.WARNING)
    )
