"""Records that grow: the state of each worker, and the time left."""

import json
import os
import signal
import time

import pytest

from manyhands.tools.record import Record
from manyhands.tools.report import _follow
from manyhands.tools.report._follow import FollowedRecords

pytestmark = pytest.mark.quick

ELSEWHERE = {"host": "other", "pid": 1, "boot": "x"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.jsonl"


def write_lines(path, *lines):
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def header(**more):
    known = {"version": 1, "name": "a", "date": "", "step": 0, "workers": 2, "keys": ["progress"]}
    return {"manyhands": {**known, "resumed": False, "torch": "", **more}}


def state_of(path, now=None):
    (worker,) = FollowedRecords([path]).states(now)
    return worker


def test_an_open_record_is_running_and_a_closed_record_has_ended(path):
    with Record(path) as record:
        record.step(loss=1.0)
        worker = state_of(path)
        assert (worker.state, worker.text) == ("running", "")
        assert 0.0 <= worker.age < 20.0
    assert state_of(path).state == "ended"


def test_a_record_that_an_exception_closed_has_failed(path):
    with pytest.raises(RuntimeError), Record(path):
        raise RuntimeError("out of memory")
    worker = state_of(path)
    assert (worker.state, worker.text) == ("failed", "ended by RuntimeError: out of memory")


def test_a_worker_that_was_killed_has_died(path):
    child = os.fork()
    if child == 0:
        record = Record(path)
        while True:
            record.step(loss=0.5)
            time.sleep(0.01)
    until = time.monotonic() + 30
    try:
        while not path.exists() or state_of(path).state != "running":
            assert time.monotonic() < until
    finally:
        os.kill(child, signal.SIGKILL)
    while state_of(path).state != "died":  # a zombie has died, too
        assert time.monotonic() < until
    os.waitpid(child, 0)
    assert state_of(path).text == "the process has ended without closing the record"


@pytest.mark.parametrize(
    ("gap", "silent_from", "said"),
    [(6.0, 60.0, "a line usually takes 6 s; "), (0.1, 30.0, "a line usually takes 0.1 s; ")],
)
def test_a_worker_is_silent_after_30_seconds_and_ten_usual_times(path, gap, silent_from, said):
    lines = [{"step": n, "time": gap * n} for n in range(1, 20)]
    write_lines(path, header(process=ELSEWHERE), *lines)
    changed = path.stat().st_mtime
    assert state_of(path, changed + silent_from - 1).state == "running"
    worker = state_of(path, changed + silent_from + 1)
    assert (worker.state, worker.age) == ("silent", pytest.approx(silent_from + 1))
    assert worker.text == said + "the process is not visible from this machine"


def test_a_worker_without_two_lines_is_silent_after_30_seconds(path):
    with Record(path):
        changed = path.stat().st_mtime
        assert state_of(path, changed + 29).state == "running"
        worker = state_of(path, changed + 31)
        assert (worker.state, worker.text) == ("silent", "the process runs")


def test_an_empty_file_has_no_line_yet(path):
    path.touch()
    worker = state_of(path)
    assert (worker.state, worker.run, worker.age) == ("waiting", None, None)


@pytest.mark.parametrize("content", ["import torch\n", '{"manyhands":{"version":9}}\n'])
def test_a_file_that_is_not_a_record_is_damaged_until_a_record_replaces_it(path, content):
    path.write_text(content)
    records = FollowedRecords([path])
    (worker,) = records.states()
    assert worker.state == "damaged" and str(path) in worker.text
    with Record(path.with_name("b.jsonl")) as record:
        record.step(loss=1.0)
    os.replace(path.with_name("b.jsonl"), path)
    (worker,) = records.states()
    assert worker.state == "ended"


def test_a_folder_has_the_records_that_appear_in_it(tmp_path):
    records = FollowedRecords([tmp_path])
    assert records.states() == []
    for name in ("b", "a"):
        with Record(tmp_path / f"{name}.jsonl"):
            pass
    (tmp_path / "notes.txt").write_text("notes\n")
    assert [worker.path.name for worker in records.states()] == ["a.jsonl", "b.jsonl"]
    (tmp_path / "a.jsonl").unlink()
    assert [worker.path.name for worker in records.states()] == ["b.jsonl"]


def test_only_a_record_that_has_changed_is_read_again(path, monkeypatch):
    read = []
    read_record = _follow.read_record
    monkeypatch.setattr(_follow, "read_record", lambda path: read.append(path) or read_record(path))
    records = FollowedRecords([path])
    with Record(path) as record:
        for steps in range(3):
            for _ in range(2):
                (worker,) = records.states()
                assert len(worker.run.lines) == steps
            assert len(read) == steps + 1
            record.step(loss=1.0)


# -- the time left ---------------------------------------------------------------------------------


def test_the_time_left_is_the_missing_progress_at_the_speed_of_the_last_minute(path):
    slow = [{"step": n, "time": 10.0 * n, "progress": 1.0 * n} for n in range(1, 101)]
    fast = []
    for n in range(1, 101):
        fast.append({"step": 100 + n, "time": 1000.0 + n, "progress": 100.0 + 4 * n})
    write_lines(path, header(until=600.0, process=ELSEWHERE), *slow, *fast)
    assert state_of(path).left == pytest.approx((600 - 500) / 4)


def test_the_time_left_is_that_of_the_last_ten_lines_if_they_took_longer(path):
    lines = [{"step": n, "time": 100.0 * n} for n in range(1, 21)]
    write_lines(path, header(until=50, process=ELSEWHERE), *lines)
    assert state_of(path).left == pytest.approx(30 * 100)  # of steps, without progress


def test_a_pause_between_two_starts_does_not_count(path):
    first = [{"step": n, "time": 5.0 * n} for n in (1, 2)]
    second = [{"step": n, "time": 2.0 * (n - 2)} for n in (3, 4)]
    write_lines(path, header(until=10, process=ELSEWHERE), *first)
    write_lines(path, header(until=10, process=ELSEWHERE, step=2, resumed=True), *second)
    assert state_of(path).left == pytest.approx(6 * 9.0 / 3)  # from 5 s to 14 s


@pytest.mark.parametrize("end", [{}, {"ended": ""}])
def test_without_a_known_end_there_is_no_time_left(path, end):
    lines = [{"step": n, "time": 1.0 * n} for n in range(1, 9)]
    write_lines(path, header(process=ELSEWHERE), *lines)
    assert state_of(path).left is None
    write_lines(path, header(until=100, process=ELSEWHERE, **end))
    assert (state_of(path).left is None) == bool(end)


# -- records that somebody has made up -------------------------------------------------------------

ODD = (
    "<a href='javascript:alert(1)'>x</a>", "\ud800", "\x1b[31m", "", None, True, -1, 2**70, 10**400,
    -(10**400), 1e308, 5e-324, "nan", "inf", [], [[]], [[1], 2], {}, {"a": {}}, [10**400, "x"],
)  # fmt: skip


@pytest.mark.parametrize("key", ["until", "process", "error", "date"])
def test_any_header_has_a_state(path, key):
    for value in ODD:
        path.unlink(missing_ok=True)
        write_lines(path, header(**{key: value}), *({"step": n, "time": n} for n in range(3)))
        assert state_of(path).state == "running"
        write_lines(path, header(ended="", **{key: value}))
        assert state_of(path).state in ("ended", "failed")


def test_any_progress_has_a_state(path):
    for first in ODD:
        path.unlink(missing_ok=True)
        lines = [{"step": n, "time": n, "progress": value} for n, value in enumerate((first, *ODD))]
        for count in range(1, len(lines) + 1):
            path.unlink(missing_ok=True)
            write_lines(path, header(until=10), *lines[:count])
            worker = state_of(path)
            assert worker.state == "running"
            assert worker.left is None or worker.left >= 0
