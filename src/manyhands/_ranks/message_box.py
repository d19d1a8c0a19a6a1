"""Messages between processes through a store, and detection of processes without a heartbeat.

    box = MessageBox(store, "manyhands/save/")
    box.put("receipt/3", text)
    box.read("receipt/3")              the text; "" if missing
    box.wait_for("answer", 20.0)       the text, after waiting up to 20 seconds
    box.beat("alive/3", 5.0, done)     in a thread: increase a counter every 5 seconds

    monitor = HeartbeatMonitor(stall=60.0)
    monitor.observe({"3": 17}, time.monotonic())       the current counters
    monitor.silent                     processes whose counter has not changed for 60 seconds

Saves (checkpoint/_writing.py), roll calls and lost connections (presence.py), and FSDP
(sharding/fsdp/_root.py) use a box. The crew's box signs messages (blocks/crew/_store.py).

Clocks of hosts are not compared. Each process measures with its own clock for how long it has
*watched* a counter without changes. The time between two observations is limited to the expected
interval, so processes that were all suspended together, as on a sleeping laptop, do not consider
each other lost after waking up.
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
        """Call the store's method of this name and return the result."""
        return getattr(self.store, name)(*args)

    def put(self, key: str, text: str) -> None:
        self.call("set", self.prefix + key, text)

    def count(self, key: str, more: int) -> int:
        """Add to a shared counter, and return the new value."""
        return int(self.call("add", self.prefix + key, more))

    def has(self, key: str) -> bool:
        return bool(self.call("check", [self.prefix + key]))

    def fetch(self, key: str) -> bytes | None:
        """Return the stored value; None if there is none."""
        return self.call("get", self.prefix + key) if self.has(key) else None

    def read(self, key: str) -> str:
        """Return the text under this key; "" if missing."""
        return self.text_of(key, self.fetch(key))

    def text_of(self, key: str, value: bytes | None) -> str:
        """Return the text of a stored value."""
        return "" if value is None else value.decode()

    def delete(self, key: str) -> None:
        self.call("delete_key", self.prefix + key)

    def wait_for(self, key: str, seconds: float) -> str:
        """Wait up to this long for a text; return the text, or "" if missing."""
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
    """Observations of a heartbeat counter."""

    count: int
    last: float  # time of the last observation
    silence: float = 0.0  # watched seconds without a change
    advanced: bool = False


class HeartbeatMonitor:
    """Monitors heartbeats. Processes without a heartbeat for `stall` seconds are silent."""

    def __init__(self, stall: float) -> None:
        self.stall = stall
        # Five heartbeats per stall time, so that late heartbeats do not make a process silent.
        self.interval = min(1.0, stall / 5)  # seconds between heartbeats, and observations
        self._counters: dict[str, _Counter] = {}

    def observe(self, counts: Mapping[str, int], now: float) -> None:
        """Process the current counters. Omitted processes are forgotten."""
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
        """Processes without a heartbeat for `stall` seconds."""
        return self.silent_for(self.stall)

    def silent_for(self, seconds: float) -> frozenset[str]:
        """Return the processes without a heartbeat for this long."""
        return frozenset(id for id, each in self._counters.items() if each.silence >= seconds)

    def has_advanced(self, id: str) -> bool:
        """Return whether this counter has increased since the first observation."""
        return id in self._counters and self._counters[id].advanced

    def reset(self) -> None:
        """Forget all observations, for example after a long suspension."""
        self._counters = {}
