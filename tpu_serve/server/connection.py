"""One TCP connection: uvicorn's, with a time limit for headers and refusals in the server's own form."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tpu_serve.server.body import dump_json
from tpu_serve.server.errors import by_phrase, error_body

HEADER_SECONDS = 30.0
"""How long a client may take from connecting, or from its first byte, to the end of a request's headers."""


class Connection(H11Protocol):
    """Closes connections whose client does not get its request said: each one costs a file descriptor."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self._clear_deadline()
        elif self._deadline is None:
            self._set_deadline()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, or has longer headers than allowed."""
        known = by_phrase(400, "This is no HTTP request that can be read, or its headers are too long.", "invalid_http")
        body = dump_json(error_body(known)[1])
        headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        with suppress(h11.LocalProtocolError):  # an answer is under way: closing the connection must do
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()
