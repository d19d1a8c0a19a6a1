"""What a rank sends: bytes through its sockets, and the collectives that it starts."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SENT = 200  # where Linux's struct tcp_info has bytes_sent
SENT_AGAIN = 208  # where it has bytes_retrans


def bytes_sent() -> int:
    """Payload that this process has sent through its open TCP connections so far."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue  # closed meanwhile: it was the listing's own
        with connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("Q", info, SENT)[0]
            total -= struct.unpack_from("Q", info, SENT_AGAIN)[0]
    return total


@contextmanager
def collectives() -> Iterator[list[int]]:
    """The bytes of each collective started meanwhile, DDP's own among them."""

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                seen.append(sum(x.nbytes for x in tree_leaves(args[0]) if isinstance(x, Tensor)))
            return func(*args, **(kwargs or {}))

    seen: list[int] = []
    with Listener():
        yield seen
