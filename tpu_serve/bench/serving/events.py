"""Server-sent events from bytes that may be split anywhere, in the middle of a character too."""

from __future__ import annotations


class EventReader:
    """Joins bytes to the data of events. Lines end with LF, CRLF or CR; comments and other fields are left out."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._skips_line_feed = False

    def feed(self, piece: bytes) -> list[str]:
        """Data of the events that `piece` completes. Bytes that are no UTF-8 read as U+FFFD."""
        events: list[str] = []
        start = 0
        while start < len(piece):
            if self._skips_line_feed:
                self._skips_line_feed = False
                if piece[start] == 0x0A:
                    start += 1
                    continue
            ends = [place for place in (piece.find(b"\n", start), piece.find(b"\r", start)) if place >= 0]
            if not ends:
                self._line += piece[start:]
                break
            end = min(ends)
            self._line += piece[start:end]
            self._skips_line_feed = piece[end] == 0x0D
            start = end + 1
            self._end_line(events)
        return events

    def _end_line(self, events: list[str]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if not line:
            if self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data.clear()
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
