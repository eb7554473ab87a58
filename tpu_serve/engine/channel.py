"""Messages over the socket between two processes: each is its length in four bytes, and so many bytes."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
PIECE = 2**18
"""Most bytes that are read at once."""
MOST_UNSENT = 2**26
"""Bytes for a peer that does not read, from which on `Outbox.send` waits for it."""


def frame(message: bytes) -> bytes:
    """A message as it is sent."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Puts messages together from the pieces in which they come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The messages that are whole now."""
        self._data += piece
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            message = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]  # before it is given away: whoever asks for no more leaves the rest to the next call
            yield message


def messages_of(connection: socket.socket, frames: Frames) -> Iterator[bytes]:
    """The messages that come from a blocking socket, until the peer ends. What has been read beyond the last one taken stays in `frames`."""
    while True:
        try:
            piece = connection.recv(PIECE)
        except ConnectionError:
            return
        if not piece:
            return
        yield from frames.feed(piece)


class Outbox:
    """Sends messages from any thread, without waiting for the peer unless it has stopped reading long ago."""

    def __init__(self, connection: socket.socket):
        """The socket is a blocking one, and is not closed here."""
        self._connection = connection
        self._unsent: deque[bytes] = deque()
        self._num_unsent = 0
        self._is_over = False
        self._change = threading.Condition()
        threading.Thread(target=self._write, name="outbox", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Sends one. Waits while more than `MOST_UNSENT` bytes are unsent. Does nothing when there is no peer any more."""
        data = frame(message)
        with self._change:
            if self._num_unsent > MOST_UNSENT:
                logger.warning("The server's process reads nothing: the engine waits with %d bytes", self._num_unsent)
                self._change.wait_for(lambda: self._is_over or self._num_unsent <= MOST_UNSENT // 2)
            if self._is_over:
                return
            if not self._unsent:
                data = data[self._send_now(data) :]
            if data:
                self._unsent.append(data)
                self._num_unsent += len(data)
                self._change.notify_all()

    def end(self) -> None:
        """Sends nothing more, and lets go whoever waits."""
        with self._change:
            self._is_over = True
            self._change.notify_all()

    def _send_now(self, data: bytes) -> int:
        """How many bytes the socket took at once."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the reader of the same socket learns of it too
            self._is_over = True
            return len(data)

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_over or self._unsent)
                if self._is_over:
                    return
                data = self._unsent[0]  # stays there until it is sent: nobody may overtake it
            try:
                self._connection.sendall(data)
            except OSError:
                self.end()
                return
            with self._change:
                self._unsent.popleft()
                self._num_unsent -= len(data)
                self._change.notify_all()


def closed(connection: socket.socket) -> None:
    """Closes a socket of which the peer learns at once, even where a thread waits in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
