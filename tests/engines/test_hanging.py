"""A process that hangs ends at SIGTERM, and one that can still save does not."""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

import manyhands as mh
from helpers.programs import run_programs
from helpers.ranks import on_ranks
from manyhands._ranks.stop_notice import stop_notice
from manyhands.engines import _hanging
from manyhands.engines._stopping import listener

TERMINATED = -signal.SIGTERM


def signal_soon(seconds=0.5):
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


def wait_in_a_collective(rank):
    mh.start()
    if rank == 0:
        signal_soon()
        dist.all_reduce(torch.zeros(1))
    else:
        time.sleep(6.0)


def test_a_rank_in_a_collective_ends_by_sigterm(monkeypatch):
    monkeypatch.setenv("MANYHANDS_GRACE", "4")
    first, _ = run_programs(2, wait_in_a_collective)
    assert first.code == TERMINATED
    assert first.seconds < 5.0
    assert (
        "rank 0 ends by SIGTERM: it has not called mh.stopping for 2 s, and waits in" in first.said
    )
    assert "dist.all_reduce(torch.zeros(1)) (test_hanging.py, line" in first.said


def compute(seconds):
    matrix = torch.randn(300, 300)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        matrix @ matrix


def test_a_script_that_never_reads_the_notice_ends_before_the_kill(monkeypatch):
    monkeypatch.setenv("MANYHANDS_GRACE", "3")
    monkeypatch.setattr(_hanging, "MARGIN", 1.0)

    def script(rank):
        mh.start(process_group=False)
        signal_soon(0.0)
        compute(10.0)

    (ended,) = run_programs(1, script)
    assert ended.code == TERMINATED
    assert 1.0 < ended.seconds < 4.0


def test_a_script_that_has_read_the_notice_may_take_its_time(monkeypatch):
    monkeypatch.setenv("MANYHANDS_GRACE", "1")
    monkeypatch.setattr(_hanging, "MARGIN", 0.3)

    def script(rank):
        mh.start(process_group=False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert mh.stopping()
        time.sleep(2.0)

    (ended,) = run_programs(1, script)
    assert ended.code == 0, ended.said


def test_an_earlier_handler_is_left_to_decide():
    def handler(*_):
        raise AssertionError("called by Job.leave only")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        listener.start()
        assert listener._hang_watch is None
    finally:
        listener.stop()
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_the_script_sets_later_is_left_to_decide(monkeypatch):
    monkeypatch.setenv("MANYHANDS_GRACE", "1")
    monkeypatch.setattr(_hanging, "MARGIN", 0.3)

    def script(rank):
        mh.start(process_group=False)
        seen = []
        signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)
        assert seen == [1]

    (ended,) = run_programs(1, script)
    assert ended.code == 0, ended.said


def test_an_event_loop_keeps_its_wakeup_descriptor():
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        listener.start()
        listener.stop()
        assert signal.set_wakeup_fd(before) == write
    finally:
        os.close(read)
        os.close(write)


@on_ranks(1)
def test_a_signal_to_a_child_is_no_notice_for_its_parent(monkeypatch):
    monkeypatch.setattr(_hanging, "MARGIN", 0.3)
    listener.start()
    child = os.fork()
    if child == 0:
        time.sleep(30.0)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    time.sleep(1.0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert stop_notice.reason == ""


@on_ranks(1)
def test_a_rank_that_was_forked_from_a_listening_process_has_a_watch():
    listener.start()
    child = os.fork()
    if child == 0:
        has_none = listener._hang_watch is None
        listener.start()
        os._exit(int(has_none and listener._hang_watch is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_the_end_of_listening_ends_the_thread():
    listener.start()
    listener.stop()
    assert "manyhands stop" not in [thread.name for thread in threading.enumerate()]
