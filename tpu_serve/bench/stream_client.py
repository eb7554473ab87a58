"""Many streams read to their end, in a process of its own: `python -m tpu_serve.bench.stream_client PORT NUM PATH BODY`.

Prints a JSON object: bytes of all answers, and how many began with status 200.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys

GUARD = 60.0
"""Seconds without a byte from any stream after which it is an error."""


def main(port: str, count: str, path: str, body: str) -> int:
    """Reads, prints; returns the exit code."""
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body.encode())}\r\n\r\n{body}".encode()
    selector, num_bytes, num_answered = selectors.DefaultSelector(), 0, 0
    for _ in range(int(count)):
        connection = socket.create_connection(("127.0.0.1", int(port)))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ)
    new = set(selector.get_map())
    while selector.get_map():
        ready = selector.select(GUARD)
        if not ready:
            print(f"no byte came for {GUARD:g} seconds", file=sys.stderr)
            return 1
        for key, _ in ready:
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            if key.fd in new:
                num_answered += data.startswith(b"HTTP/1.1 200 ")
                new.discard(key.fd)
            num_bytes += len(data)
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
    print(json.dumps({"num_bytes": num_bytes, "num_answered": num_answered}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
