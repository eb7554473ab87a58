"""The two files of a batch: lines of requests in, lines of results out, in the format of OpenAI's Batch API.

A line in is `{"custom_id", "method": "POST", "url", "body"}`; a line out is `{"id", "custom_id", "response": {"status_code", "request_id",
"body"}, "error"}`. A failed line carries its error object twice, as `response.body.error` and as `error`, because readers look in either place.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tpu_serve.config import ConfigError
from tpu_serve.request import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of the input file.

    Attributes:
      number: of the line, from 1.
      custom_id: None where the line has none.
      problem: why this is not a request; url and body mean nothing then.
    """

    number: int
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    problem: InvalidRequest | None = None

    @property
    def key(self) -> str | int:
        """What a resumed run knows the line by: its custom_id, or its number when something is wrong with the line itself."""
        return self.number if self.problem is not None or self.custom_id is None else self.custom_id


def read_lines(file: Iterable[bytes], urls: Iterable[str]) -> Iterator[BatchLine]:
    """The requests of a file, one a line; blank lines are skipped. Whatever is wrong with a line becomes its `problem`.

    Args:
      urls: those that may be asked.
    """
    urls, seen = sorted(urls), set[str]()
    for number, raw in enumerate(file, 1):
        if not raw.strip():
            continue
        custom_id = None
        try:
            values = _parse(raw)
            name = values.get("custom_id")
            custom_id = name if isinstance(name, str) else None
            if custom_id is None:
                raise InvalidRequest("custom_id", "custom_id must be a string.", _reason(values, "custom_id"))
            if custom_id in seen:
                message = f"custom_id {custom_id!r} is taken by an earlier line."
                raise InvalidRequest("custom_id", message, "duplicate_custom_id")
            seen.add(custom_id)
            body = _check(values, urls)
            yield BatchLine(number=number, custom_id=custom_id, url=values["url"], body=body)
        except InvalidRequest as error:
            problem = InvalidRequest(error.param, f"Line {number}: {error.message}", error.reason, error.status)
            yield BatchLine(number=number, custom_id=custom_id, problem=problem)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.rstrip(b"\r\n").decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(None, f"The line is not UTF-8: {error.reason}.", "invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"The line is not JSON: {error.msg} at column {error.colno}."
        raise InvalidRequest(None, message, "invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(None, f"The line is not JSON: {error}.", "invalid_json") from None
    if not isinstance(values, dict):
        raise InvalidRequest(None, "The line must be a JSON object.", "invalid_json")
    return values


def _check(values: Mapping[str, Any], urls: list[str]) -> dict[str, Any]:
    """The body of a well-formed line."""
    if values.get("method") != "POST":
        raise InvalidRequest("method", 'method must be "POST".', _reason(values, "method"))
    if values.get("url") not in urls:
        message = f"url must be one of {', '.join(urls)}, got {values.get('url')!r}."
        raise InvalidRequest("url", message, _reason(values, "url"))
    body = values.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest("body", "body must be a JSON object.", _reason(values, "body"))
    if body.get("stream"):
        raise InvalidRequest("body.stream", "A request of a batch cannot be streamed.")
    return body


def _reason(values: Mapping[str, Any], name: str) -> str:
    return "invalid_value" if name in values else "missing_required_parameter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to one line, good or bad.

    Attributes:
      status: HTTP status that the server would have answered.
      body: the response, or `{"error": …}`.
    """

    line: BatchLine
    status: int
    body: dict[str, Any]

    @property
    def failed(self) -> bool:
        return self.status >= 400

    def num_tokens(self, kind: Literal["prompt", "completion"]) -> int:
        """Tokens that the response counts as these, or as input and output."""
        usage = self.body.get("usage") or {}
        other = "input" if kind == "prompt" else "output"
        return int(usage.get(f"{kind}_tokens") or usage.get(f"{other}_tokens") or 0)

    def as_json(self) -> dict[str, Any]:
        error = None
        if self.failed:
            error = dict(self.body["error"])
            if self.line.problem is not None:
                error["line"] = self.line.number
        request_id = self.body.get("id") or f"req-{uuid.uuid4().hex}"
        response = {"status_code": self.status, "request_id": request_id, "body": self.body}
        return {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.line.custom_id,
            "response": response,
            "error": error,
        }


class ResultWriter:
    """Appends results so that those written survive whatever happens next. Call `start` before the first `write`.

    Args:
      file: open for writing, not truncated yet.
      end: bytes at its beginning that stay.
      answered: see below.

    Attributes:
      answered: keys of the lines that an earlier run answered, and whether that answer was an error.
    """

    def __init__(self, file: BinaryIO, end: int = 0, answered: Mapping[str | int, bool] | None = None):
        self._file, self._end, self.answered = file, end, answered or {}

    @classmethod
    def open(cls, path: Path, *, resume: bool) -> ResultWriter:
        """Opens a file, to be replaced or, with `resume`, continued after its last complete line. Nothing in it changes before `start`.

        Raises:
          ConfigError: the file cannot be written, or holds something other than results.
        """
        try:
            file = path.open("r+b" if path.is_file() else "wb")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
        try:
            answered, end = _read_results(file, path) if resume and file.readable() else ({}, 0)
        except ConfigError:
            file.close()
            raise
        return cls(file, end, answered)

    def start(self) -> None:
        """Cuts off what is to be replaced."""
        if self._file.seekable() and self._file.readable():
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def write(self, results: Iterable[Result]) -> None:
        """Writes results and waits until they are on the disk.

        Raises:
          OSError: they are not.
        """
        self._file.write(b"".join(json.dumps(result.as_json()).encode() + b"\n" for result in results))
        self._file.flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # pipes and terminals have no disk to wait for
                raise

    def close(self) -> None:
        self._file.close()


def _read_results(file: BinaryIO, path: Path) -> tuple[dict[str | int, bool], int]:
    """(answered lines by key, bytes up to the end of the last complete line)."""
    answered: dict[str | int, bool] = {}
    end = 0
    for number, raw in enumerate(file, 1):
        if not raw.endswith(b"\n"):
            break  # the earlier run was cut off while writing it
        end += len(raw)
        try:
            result = json.loads(raw)
            custom_id, error = result["custom_id"], result["error"]
            key = custom_id if error is None else error.get("line", custom_id)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"Line {number} of {path} is not a result, so the file cannot be continued.") from None
        answered[key] = error is not None
    return answered, end
