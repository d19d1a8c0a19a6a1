"""Messages and heartbeats of processes through a store.

    box = MessageBox(store, "manyhands/save/")
    box.put("receipt/3", text)
    box.read("receipt/3")              the text; "" if missing
    box.wait_for("answer", 20.0)       the text, after waiting up to 20 seconds
    box.beat("alive/3", 5.0, done)     in a thread: increase a counter every 5 seconds

    monitor = HeartbeatMonitor(stall=60.0)
    monitor.observe({"3": 17}, time.monotonic())       the current counters
    monitor.silent                     processes with no change of the counter for 60 seconds

Saves (checkpoint/_writing.py), roll calls and lost connections (presence.py), and FSDP
(sharding/fsdp/_root.py) use a box. The crew's box signs messages (blocks/crew/_store.py).

Clocks of hosts are not compared. Each process measures for how long it has *watched* a counter
with no change. The time between two observations is limited, so processes that were suspended
together, as on a sleeping laptop, do not consider each other lost after waking up.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


class MessageBox:
    """Texts in a store, under keys with a common prefix."""

    def __init__(self, store: Any, prefix: str = "") -> None:
        self.store = store
        self.prefix = prefix

    def call(self, name: str, *args: Any) -> Any:
        return getattr(self.store, name)(*args)

    def put(self, key: str, text: str) -> None:
        self.call("set", self.prefix + key, text)

    def count(self, key: str, more: int) -> int:
        return int(self.call("add", self.prefix + key, more))

    def has(self, key: str) -> bool:
        return bool(self.call("check", [self.prefix + key]))

    def fetch(self, key: str) -> bytes | None:
        return self.call("get", self.prefix + key) if self.has(key) else None

    def read(self, key: str) -> str:
        return self.text_of(key, self.fetch(key))

    def text_of(self, key: str, value: bytes | None) -> str:
        return "" if value is None else value.decode()

    def delete(self, key: str) -> None:
        self.call("delete_key", self.prefix + key)

    def wait_for(self, key: str, seconds: float) -> str:
        self.store.set_timeout(timedelta(seconds=seconds))
        try:
            return self.text_of(key, self.store.get(self.prefix + key))
        except RuntimeError as error:
            if "imeout" not in str(error):
                raise
            return ""

    def beat(self, key: str, interval: float, done: threading.Event) -> None:
        """Write a heartbeat until `done` is set. Call in a thread."""
        count = 0
        while not done.wait(interval):
            count += 1
            self.put(key, str(count))


@dataclass
class _Counter:
    count: int
    last: float  # time of the last observation
    silence: float = 0.0  # watched seconds without a change
    advanced: bool = False


class HeartbeatMonitor:
    """Monitors heartbeats."""

    def __init__(self, stall: float) -> None:
        self.stall = stall
        # Five heartbeats per stall time, so that late heartbeats do not make a process silent.
        self.interval = min(1.0, stall / 5)  # seconds between heartbeats, and observations
        self._counters: dict[str, _Counter] = {}

    def observe(self, counts: Mapping[str, int], now: float) -> None:
        """Process the current counters, and forget omitted processes."""
        counters = {}
        for id, count in counts.items():
            counter = self._counters.get(id) or _Counter(count, now)
            # A lower count is a replayed value and does not prove that the process is alive.
            if count > counter.count:
                counter.count = count
                counter.silence = 0.0
                counter.advanced = True
            else:
                # The limit excludes time in which this process was suspended.
                counter.silence += min(now - counter.last, 2 * self.interval)
            counter.last = now
            counters[id] = counter
        self._counters = counters

    @property
    def silent(self) -> frozenset[str]:
        """The processes with no heartbeat for `stall` seconds."""
        return self.silent_for(self.stall)

    def silent_for(self, seconds: float) -> frozenset[str]:
        return frozenset(id for id, each in self._counters.items() if each.silence >= seconds)

    def has_advanced(self, id: str) -> bool:
        return id in self._counters and self._counters[id].advanced

    def reset(self) -> None:
        self._counters = {}
