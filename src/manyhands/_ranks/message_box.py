"""Leave messages for other processes in a store, and find those without a heartbeat.

    box = MessageBox(store, "manyhands/save/")
    box.put("receipt/3", text)
    box.read("receipt/3")              the text; "" if no process has written one
    box.wait_for("answer", 20.0)       the same, but wait up to 20 seconds
    box.beat("alive/3", 5.0, done)     in a thread: increase a counter every 5 seconds

    monitor = HeartbeatMonitor(stall=60.0)
    monitor.observe({"3": 17}, time.monotonic())       the counters as they are now
    monitor.silent                     the processes whose counter has stood still for 60 seconds

Saves (checkpoint/_writing.py), roll calls (groups.py), forwards of FSDP (sharding/fsdp/_root.py)
and explanations of lost connections (presence.py) use a box. The crew's box signs its messages
(blocks/crew/_store.py).

Clocks are not compared between hosts. Each process reads the counters of other processes, and
measures with its clock for how long it has *watched* a counter stand still. The time between two
observations counts for no more than an observation should take. So processes that were all stopped
together, as on a laptop that sleeps, do not consider each other lost when they wake up.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


class MessageBox:
    """The texts that processes have left in a store, under keys with one prefix."""

    def __init__(self, store: Any, prefix: str = "") -> None:
        self.store = store
        self.prefix = prefix

    def call(self, name: str, *args: Any) -> Any:
        """Call the store's method of this name, and return its result."""
        return getattr(self.store, name)(*args)

    def put(self, key: str, text: str) -> None:
        self.call("set", self.prefix + key, text)

    def count(self, key: str, more: int) -> int:
        """Add to a counter that all processes share, and return its value."""
        return int(self.call("add", self.prefix + key, more))

    def has(self, key: str) -> bool:
        return bool(self.call("check", [self.prefix + key]))

    def fetch(self, key: str) -> bytes | None:
        """Return the stored value; None if there is none."""
        return self.call("get", self.prefix + key) if self.has(key) else None

    def read(self, key: str) -> str:
        """Return the text under this key; "" if no process has written one."""
        return self.text_of(key, self.fetch(key))

    def text_of(self, key: str, value: bytes | None) -> str:
        """Return the text of a stored value."""
        return "" if value is None else value.decode()

    def delete(self, key: str) -> None:
        self.call("delete_key", self.prefix + key)

    def wait_for(self, key: str, seconds: float) -> str:
        """Return the text under this key; "" if that takes longer."""
        self.store.set_timeout(timedelta(seconds=seconds))
        try:
            return self.text_of(key, self.store.get(self.prefix + key))
        except RuntimeError as error:
            if "imeout" not in str(error):
                raise
            return ""

    def beat(self, key: str, interval: float, done: threading.Event) -> None:
        """Increase a counter until `done` is set: a heartbeat. Call it in a thread."""
        count = 0
        while not done.wait(interval):
            count += 1
            self.put(key, str(count))


@dataclass
class _Counter:
    """A heartbeat counter, as this process has observed it."""

    count: int
    last: float  # time of the latest observation
    silence: float = 0.0  # seconds for which it was watched standing still
    advanced: bool = False


class HeartbeatMonitor:
    """The heartbeats of other processes. One without a heartbeat for `stall` seconds is lost."""

    def __init__(self, stall: float) -> None:
        self.stall = stall
        # Five heartbeats for each stall time: one lost or late heartbeat makes no process silent.
        self.interval = min(1.0, stall / 5)  # seconds between heartbeats, and observations
        self._counters: dict[str, _Counter] = {}

    def observe(self, counts: Mapping[str, int], now: float) -> None:
        """Take in the present counter of each process; processes not named are forgotten."""
        counters = {}
        for id, count in counts.items():
            counter = self._counters.get(id) or _Counter(count, now)
            # A lower count is an old value that a stranger has put back: no sign of life.
            if count > counter.count:
                counter.count = count
                counter.silence = 0.0
                counter.advanced = True
            else:
                # The limit leaves out time in which this process itself was stopped.
                counter.silence += min(now - counter.last, 2 * self.interval)
            counter.last = now
            counters[id] = counter
        self._counters = counters

    @property
    def silent(self) -> frozenset[str]:
        """The processes without a heartbeat for `stall` seconds."""
        return self.silent_for(self.stall)

    def silent_for(self, seconds: float) -> frozenset[str]:
        """Return the processes without a heartbeat for this long."""
        return frozenset(id for id, one in self._counters.items() if one.silence >= seconds)

    def has_advanced(self, id: str) -> bool:
        """Return whether this counter has increased since the first observation."""
        return id in self._counters and self._counters[id].advanced

    def reset(self) -> None:
        """Forget all observations, as after a long stop of this process."""
        self._counters = {}
