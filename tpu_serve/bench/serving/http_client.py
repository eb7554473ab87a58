"""An HTTP/1.1 client for many streams at once, small enough that what it measures is the server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from tpu_serve.config import ConfigError

CONNECT_SECONDS = 30.0
MAX_HEADERS = 200
_READ_BYTES = 65536


class BrokenConnection(Exception):
    """What came is no complete HTTP answer. The message says how it ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer, and its body as it arrives."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.body])


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_used: bool = False

    @property
    def is_open(self) -> bool:
        return not self.reader.at_eof() and not self.writer.is_closing()


class HttpClient:
    """Connections to one server, kept open between requests. For one event loop.

    Args:
      base_url: scheme, host, port and perhaps a path that goes before every path.
      headers: sent with every request.
      is_insecure: certificates are not checked.

    Raises:
      ConfigError: the URL is none.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None, *, is_insecure: bool = False):
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--base-url {base_url} is not a URL like http://127.0.0.1:8000.")
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/")
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if is_insecure:
                self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._headers = {"host": parts.netloc.rpartition("@")[2], "user-agent": "tpu-serve bench", **(headers or {})}
        for name, value in self._headers.items():
            if not f"{name}{value}".isascii() or not f"{name}{value}".isprintable():
                raise ConfigError(
                    f"The header {name} holds characters that cannot be sent: headers are printable ASCII."
                )
        self._idle: list[_Connection] = []
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"

    @asynccontextmanager
    async def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Answer]:
        """One exchange; leaving the context before the body's end gives the answer up. How long it may take is the caller's business.

        Raises:
          OSError: the server cannot be reached, or the connection broke; `TimeoutError` when it accepts no connection.
          BrokenConnection: the answer is incomplete; also while the body is read.
        """
        lines = [f"{method} {self._path}{path} HTTP/1.1"]
        all_headers = {**self._headers, **(headers or {})}
        if body is not None:
            all_headers |= {"content-type": "application/json", "content-length": str(len(body))}
        lines += [f"{name}: {value}" for name, value in all_headers.items()]
        data = "\r\n".join([*lines, "", ""]).encode("ascii") + (body or b"")
        connection, status, answered = await self._exchange(data)
        ended = asyncio.Event()
        try:
            yield Answer(status, answered, _body(connection.reader, status, answered, ended))
        finally:
            if ended.is_set() and connection.is_open and answered.get("connection", "").lower() != "close":
                connection.is_used = True
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _exchange(self, data: bytes) -> tuple[_Connection, int, dict[str, str]]:
        while True:
            connection = await self._connect()
            try:
                connection.writer.write(data)
                await connection.writer.drain()
                return connection, *await _head(connection.reader)
            except (BrokenConnection, ConnectionError):
                connection.writer.close()
                # The server may close an idle connection at any moment; a fresh one tells whether there is more to it.
                if not connection.is_used:
                    raise
            except BaseException:
                connection.writer.close()
                raise

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.writer.close()
        opening = asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return _Connection(*await asyncio.wait_for(opening, CONNECT_SECONDS))

    async def close(self) -> None:
        """Closes idle connections."""
        while self._idle:
            writer = self._idle.pop().writer
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except ValueError:
        raise BrokenConnection("a line of the HTTP answer is too long") from None
    if not line.endswith(b"\n"):
        raise BrokenConnection("the connection was closed before the answer was complete")
    return line.rstrip(b"\r\n")


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    while True:
        words = (await _line(reader)).split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise BrokenConnection("the server does not speak HTTP/1.1")
        headers: dict[str, str] = {}
        for _ in range(MAX_HEADERS):
            line = await _line(reader)
            if not line:
                break
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        else:
            raise BrokenConnection(f"the answer has more than {MAX_HEADERS} headers")
        if not words[1].startswith(b"1"):  # 100 Continue and the like come before the answer
            return int(words[1]), headers


async def _body(
    reader: asyncio.StreamReader, status: int, headers: Mapping[str, str], ended: asyncio.Event
) -> AsyncIterator[bytes]:
    """Pieces of the body as they arrive; sets `ended` when it is complete and the connection can be used again."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while True:
            size = (await _line(reader)).partition(b";")[0]
            try:
                left = int(size, 16)
            except ValueError:
                raise BrokenConnection("a chunk of the HTTP answer has no size") from None
            if left == 0:
                while await _line(reader):
                    pass
                ended.set()
                return
            while left:
                piece = await _some(reader, left)
                left -= len(piece)
                yield piece
            await _line(reader)
    elif (length := headers.get("content-length", "")).isdigit() or status in (204, 304):
        left = int(length or 0)
        while left:
            piece = await _some(reader, left)
            left -= len(piece)
            yield piece
        ended.set()
    else:  # the end of the connection is the end of the answer
        while piece := await reader.read(_READ_BYTES):
            yield piece


async def _some(reader: asyncio.StreamReader, most: int) -> bytes:
    piece = await reader.read(min(most, _READ_BYTES))
    if not piece:
        raise BrokenConnection("the connection was closed before the answer was complete")
    return piece
