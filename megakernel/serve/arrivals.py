"""A client that only notes when tokens arrive: it parses nothing before the end, so its own cost is in no figure.

    python -m megakernel.serve.arrivals 127.0.0.1 8000 < body.json

reads the body of a streamed completion with return_token_ids and prints a JSON list: for each token the seconds of
perf_counter (one clock for all processes of a machine) at which its bytes were there. With --spin it asks the socket
without a pause instead of sleeping in it: the time to wake a process is left out too, for one whole core.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import time
from collections.abc import Sequence

from megakernel.serve.command import reported, whole

IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')


def received(host: str, port: int, body: bytes, spin: bool) -> list[tuple[float, bytes]]:
    """Everything that was received, with the time of each part. Raises OSError."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    out: list[tuple[float, bytes]] = []
    try:
        made = socket.create_connection((host, port))
    except OSError as e:
        raise OSError(f"no connection to {host} port {port}: {e.strerror or e}") from e
    with made:
        made.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        made.setblocking(not spin)
        while True:
            try:
                data = made.recv(1 << 16)
            except BlockingIOError:
                continue
            out.append((time.perf_counter(), data))
            if not data:
                return out


def token_times(parts: Sequence[tuple[float, bytes]]) -> list[float]:
    """The time of each token whose id is among the bytes; of an id that came in two parts, that of the second."""
    whole = b"".join(data for _, data in parts)
    times: list[float] = []
    ends = iter(parts)
    at, data = next(ends)
    reached = len(data)
    for found in IDS.finditer(whole):
        while reached < found.end():
            at, data = next(ends)
            reached += len(data)
        times += [at] * len(found[1].split(b",")) if found[1] else []
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megakernel.serve.arrivals", description=__doc__)
    parser.add_argument("host")
    parser.add_argument("port", type=whole(1, 65535))
    parser.add_argument("--spin", action="store_true")
    return reported(lambda: _run(parser.parse_args(arguments)))


def _run(chosen: argparse.Namespace) -> int:
    parts = received(chosen.host, chosen.port, sys.stdin.buffer.read(), chosen.spin)
    first = parts[0][1].split(b"\r\n", 1)[0]
    if b" 200 " not in first:
        sys.stderr.write(b"".join(data for _, data in parts).decode("utf-8", "replace") + "\n")
        return 1
    sys.stdout.write(json.dumps(token_times(parts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
