"""A client of servers with OpenAI's API, made of the standard library, that says in one sentence what went wrong."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tpu_serve.config import ConfigError
from tpu_serve.config.client import KEY_VARIABLES

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
"""How long a server may say nothing at all."""
MAX_ERROR_BYTES = 2**20


class Refused(Exception):
    """The server answered, and the answer is an error. The message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer that comes.

    Attributes:
      ignored: names of request fields that had no effect, with commas between them.
      chunks: of the answer.
    """

    ignored: str
    chunks: Iterator[dict[str, Any]]


class Remote:
    """A server.

    Args:
      url: of its API, with or without /v1; `http://` may be left out.
      api_key: sent as a bearer token.

    Raises:
      ConfigError: the URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme not in ("http", "https") or not parts.hostname or (port is None and ":" in _after_host(parts)):
            raise ConfigError(f"--url {url} is not a URL like http://127.0.0.1:8000/v1.")
        self._is_tls, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._base = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1"
        self._headers = {"accept": "application/json, text/event-stream", "user-agent": "tpu-serve"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise ConfigError("The API key holds characters that cannot be sent: keys are printable ASCII.")
            self._headers["authorization"] = f"Bearer {api_key}"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._base}"

    def first_model(self) -> str:
        """The name that the server gives to its model.

        Raises:
          ConfigError, Refused: it does not say.
        """
        with self._send("GET", "/models", None) as response:
            body = _parse(response.read(), self.url)
        try:
            return str(body["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise Refused(f"{self.url}/models names no model; say which with --model-name.") from None

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Stream]:
        """A streamed answer; leaving the context ends it.

        Raises:
          ConfigError: the server cannot be reached.
          Refused: it refused the request, or the answer ended early; also while iterating.
        """
        with self._send("POST", path, {**body, "stream": True}) as response:
            ignored = response.headers.get("x-tpu-serve-ignored", "").replace(",", ", ")
            yield Stream(ignored, self._events(response))

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        while True:
            try:
                line = response.readline()
            except (OSError, http.client.HTTPException) as error:
                raise Refused(f"The connection to {self.url} broke before the answer was complete: {error}.") from None
            if not line:
                raise Refused(f"{self.url} closed the connection before the answer was complete.")
            name, _, data = line.decode("utf-8", "replace").rstrip("\r\n").partition(":")
            if name != "data":
                continue
            if data.strip() == "[DONE]":
                return
            chunk = _parse(data.encode(), self.url)
            if "error" in chunk:
                raise Refused(_sentence(chunk, ""))
            yield chunk

    @contextmanager
    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            data = None if body is None else json.dumps(body).encode()
            headers = self._headers if data is None else {**self._headers, "content-type": "application/json"}
            try:
                connection.connect()
                connection.sock.settimeout(ANSWER_SECONDS)
                connection.request(method, f"{self._base}{path}", data, headers)
                response = connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                message = f"The certificate of {self.url} is not trusted: {error.verify_message}."
                raise ConfigError(f"{message} The environment variable SSL_CERT_FILE may name one that is.") from None
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(self._unreachable(error)) from None
            if response.status >= 300:
                raise Refused(self._explain(response))
            yield response
        finally:
            connection.close()

    def _unreachable(self, error: Exception) -> str:
        if isinstance(error, ConnectionRefusedError):
            return (
                f"Nothing listens at {self.url}. Start a server with `tpu-serve serve`, or say where it is with --url."
            )
        if isinstance(error, socket.gaierror):
            return f"There is no host {self._host!r} ({error.strerror}); --url says where the server is."
        if isinstance(error, TimeoutError):
            return f"{self.url} does not answer."
        return f"{self.url} cannot be used: {str(error) or type(error).__name__}."

    def _explain(self, response: http.client.HTTPResponse) -> str:
        try:
            body = json.loads(response.read(MAX_ERROR_BYTES))
        except (ValueError, OSError, http.client.HTTPException):
            body = None
        said = _sentence(body, f"{self.url} answered {response.status} {response.reason}")
        if response.status in (401, 403):
            return f"{said} (--api-key, or the environment variables {' and '.join(KEY_VARIABLES)})"
        if response.status == 404 and not _knows_path(body):
            return f"{said.rstrip('.')}. Is --url {self.url} right?"
        return said


def _knows_path(body: Any) -> bool:
    """Whether a 404 is about what was asked and not about where: servers that do not know a path have no error object of their own."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and error.get("reason") != "not_found"


def _after_host(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2].rpartition("]")[2]


def _sentence(body: Any, otherwise: str) -> str:
    """What an error body says, in the shapes of several servers."""
    error = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return (
        " ".join(message.split()) if isinstance(message, str) and message.strip() else otherwise or "The server failed."
    )


def _parse(data: bytes, url: str) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Refused(f"{url} does not answer as OpenAI's API does.")
    return body
