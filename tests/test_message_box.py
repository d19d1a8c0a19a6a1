"""Messages between processes through a store, and the heartbeats of those that write them."""

import threading
import time

import pytest
import torch.distributed as dist

from manyhands._ranks.message_box import HeartbeatMonitor, MessageBox

pytestmark = pytest.mark.quick


def test_a_message_is_there_once_it_was_put_and_until_it_is_deleted():
    store = dist.HashStore()
    ours = MessageBox(store, "ours/")
    assert (ours.read("key"), ours.has("key"), ours.fetch("key")) == ("", False, None)
    ours.put("key", "text")
    assert MessageBox(store, "ours/").read("key") == "text"
    assert MessageBox(store, "theirs/").read("key") == ""
    ours.delete("key")
    assert not ours.has("key")


def test_a_box_counts_for_all_processes():
    store = dist.HashStore()
    assert [MessageBox(store).count("calls", more) for more in (1, 2, 0, -1)] == [1, 3, 3, 2]


def test_a_message_that_does_not_come_in_time_is_empty_and_other_errors_are_raised():
    box = MessageBox(dist.HashStore())
    began = time.monotonic()
    assert box.wait_for("key", 0.1) == ""
    assert time.monotonic() - began < 5.0
    box.put("key", "text")
    assert box.wait_for("key", 0.1) == "text"

    def fail(key):
        raise RuntimeError("Connection reset by peer")

    box.store = type("Ended", (), {"set_timeout": lambda *_: None, "get": staticmethod(fail)})()
    with pytest.raises(RuntimeError, match="reset by peer"):
        box.wait_for("key", 0.1)


def test_a_process_is_silent_when_its_heartbeat_ends():
    box = MessageBox(dist.HashStore())
    monitor = HeartbeatMonitor(stall=0.5)
    over = threading.Event()
    thread = threading.Thread(target=box.beat, args=("alive", 0.02, over))
    thread.start()

    def silent_within(seconds):
        until = time.monotonic() + seconds
        while not monitor.silent and time.monotonic() < until:
            monitor.observe({"0": int(box.read("alive") or 0)}, time.monotonic())
            time.sleep(monitor.interval / 2)
        return monitor.silent

    assert silent_within(1.0) == frozenset()
    over.set()
    thread.join()
    assert silent_within(10.0) == {"0"}
