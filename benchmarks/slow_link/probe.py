"""What the line gives: the round trip of one byte, and the rate of a TCP connection.

One process on each host, the first of which asks and the second of which answers.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from slow_link.relay import Link

CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of one's own network
PORT = 7700
PINGS = 20
WARM, SENT = 4_000_000, 25_000_000  # bytes: until TCP is up to speed, and those that count


def probe(link: Link) -> dict[str, Any]:
    """Round trip in ms, Mbit/s of one direction and of both at once, and the relay's CPU share."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    sides: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (_answer, (link,)),
        (_ask, (link, theirs)),
    ]
    processes = [context.Process(target=side, args=args, daemon=True) for side, args in sides]
    try:
        for process in processes:
            process.start()
        if not ours.poll(60):
            raise RuntimeError("the slow link carries nothing: its probe had no answer in 60 s.")
        found: dict[str, Any] = ours.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _answer(link: Link) -> None:
    link.enter(1)
    with socket.create_server((link.hosts[1].address, PORT)) as server:
        connection, _ = server.accept()
        _prompt(connection)
        for _ in range(PINGS):
            connection.sendall(connection.recv(1))
        for size in (WARM, SENT):
            _receive(connection, size)
            connection.sendall(b"!")
        _exchange(connection, WARM)
        _exchange(connection, SENT)
        connection.recv(1)


def _ask(link: Link, result: Connection) -> None:
    link.enter(0)
    connection = _connected(link.hosts[1].address)
    _prompt(connection)
    pings = []
    for _ in range(PINGS):
        began = time.perf_counter()
        connection.sendall(b"?")
        connection.recv(1)
        pings.append(time.perf_counter() - began)
    for size in (WARM, SENT):
        began = time.perf_counter()
        connection.sendall(bytes(size))
        connection.recv(1)
    one_way = time.perf_counter() - began
    _exchange(connection, WARM)
    began, before = time.perf_counter(), link.carried()
    _exchange(connection, SENT)
    both_ways, after = time.perf_counter() - began, link.carried()
    result.send(
        {
            "congestion_control": CONGESTION_CONTROL.read_text().strip(),
            "round_trip_ms": 1e3 * median(pings),
            "one_way": 8e-6 * SENT / one_way,
            "both_ways": 8e-6 * SENT / both_ways,
            "relay_cpu": (after["cpu"] - before["cpu"]) / both_ways,
            "packets_per_second": (after["packets"] - before["packets"]) / both_ways,
        }
    )


def _connected(address: str) -> socket.socket:
    """A connection, once the other side listens."""
    for _ in range(100):
        try:
            return socket.create_connection((address, PORT), timeout=30)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise RuntimeError("the probe's other side does not listen.")


def _prompt(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, size: int) -> None:
    buffer = bytearray(1 << 20)
    while size:
        size -= connection.recv_into(buffer, min(size, len(buffer)))


def _exchange(connection: socket.socket, size: int) -> None:
    """Send and receive so many bytes at the same time."""
    sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
    sender.start()
    _receive(connection, size)
    sender.join()
