"""One job by its record: what is read, what is known of it, and what it costs."""

import doctest
import json
import math
import os
import signal
import time

import pytest

from manyhands import watch
from manyhands.record import Record, read_record
from manyhands.record._run import GrowingRecord, is_alive, this_process
from manyhands.watch import Jobs, WatchedJob, _jobs, _points

pytestmark = pytest.mark.quick


class Training:
    """What a record sees of a rule with blocks."""

    def __init__(self):
        self.values = {"step": 0, "progress": 0.0, "scale": 8.0, "workers": 4, "gain": 4.0}
        self.values |= {"undone": 0, "left_out": 0, "skipped": 0, "nonfinite": 0, "lr": [0.1, 0.2]}

    def snapshot(self):
        return dict(self.values)

    def step(self, **values):
        self.values["step"] += 1
        self.values["progress"] += self.values["gain"]
        self.values |= values


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.jsonl"


def read(path):
    job = WatchedJob(path)
    job.read(seconds=10.0)
    return job.state()


def write_lines(path, *lines):
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def header(**more):
    known = {"version": 1, "name": "a", "date": "", "step": 0, "workers": 2, "keys": ["progress"]}
    return {"manyhands": {**known, "resumed": False, "torch": "", **more}}


# -- the file ----------------------------------------------------------------------------------


def test_each_byte_is_read_once(path, monkeypatch):
    taken = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *a: taken.append(len(data := pread(*a))) or data)
    file = GrowingRecord(path)
    assert file.read() == []  # there is no file yet
    record = Record(path)
    for step in range(1, 200):
        record.step(loss=1.0 / step)
        (line,) = [line for line in file.read() if "step" in line]
        assert line["step"] == step
    record.close()
    assert len(file.read()) == 1  # the end
    assert sum(taken) == path.stat().st_size


def test_half_a_line_is_read_when_it_is_whole(path):
    with Record(path) as record:
        record.step(loss=0.5)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        file = GrowingRecord(path)
        before = file.read()
        assert len(before) == whole[:cut].count(b"\n")
        with open(path, "ab") as rest:
            rest.write(whole[cut:])
        assert len(before) + len(file.read()) == 3


def test_a_file_that_was_replaced_or_emptied_is_read_anew(path, tmp_path):
    file = GrowingRecord(path)
    for number, replaced in enumerate((False, True, False)):
        if replaced:
            path.unlink()
        with Record(path, mode="overwrite", name=f"run {number}") as record:
            for step in range(5 + number):
                record.step(loss=float(step))
        lines = file.read()
        assert lines[0]["manyhands"]["name"] == f"run {number}"
        assert len(lines) == 7 + number
    assert file.restarts == 2


def test_a_large_record_is_read_in_parts(path):
    write_lines(path, header(), *({"step": n, "time": 0.1 * n, "loss": 1.0} for n in range(60_000)))
    job, parts = WatchedJob(path), 0
    while True:
        job.read(seconds=0.0)
        parts += 1
        if not job.state().behind:
            break
        assert job.state().text == "reading the record"
    assert parts > 2
    assert job.state().step == 59_999


def test_what_is_kept_does_not_grow_with_the_run(path):
    count = 20_000
    lines = ({"step": n, "time": 0.1 * n, "loss": n % 7 + 1e6 * (n == 777)} for n in range(count))
    write_lines(path, header(), *lines)
    job = WatchedJob(path, most=50)
    while job.state().step != count - 1:
        job.read()
    curves = job.curves()
    assert 50 <= len(curves["x"]["step"]) <= 100
    assert max(curves["high"]["loss"]) == 1e6 + 777 % 7  # a single spike is still seen
    assert curves["mean"]["loss"][-2] == pytest.approx(3.0, rel=0.02)
    assert len(job._marks) <= _jobs.MARKS


@pytest.mark.parametrize(
    "content",
    [
        "import torch\n",
        '{"step":1,"time":0}\n',
        '{"manyhands":{"version":9}}\n',
        "\x00" * 100 + "\n",
    ],
)
def test_a_file_that_is_no_record_is_said(path, content):
    path.write_text(content)
    state = read(path)
    assert state.state == "damaged" and str(path) in state.text
    job = WatchedJob(path)
    job.read()
    with Record(path.with_name("b.jsonl")) as record:
        record.step(loss=1.0)
    os.replace(path.with_name("b.jsonl"), path)  # and it is watched again once it is one
    job.read()
    assert (job.state().state, job.state().step) == ("ended", 1)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert read(tmp_path / "pipe").state in ("damaged", "waiting")


# -- what is known -----------------------------------------------------------------------------


def test_a_job_shows_its_last_line(path):
    training = Training()
    with Record(path, training, batch_size=16, until=400.0, config={"lr": 0.1}) as record:
        for step in range(10):
            training.step()
            record.step(loss=1.0 / (1 + step))
        state = read(path)
        assert state.state == "running" and not state.text
    assert (state.name, state.step, state.progress, state.own) == ("a", 10, 40.0, ("loss",))
    assert state.latest["loss"] == pytest.approx(0.1)
    assert state.latest["efficiency"] == 0.5  # a gain of 4 of 8
    assert (state.batch, state.batch_unit) == (128.0, "samples")
    assert (state.workers, state.rounds, state.faults) == (4, None, {})
    assert state.config == {"lr": 0.1}
    assert state.process.endswith(f"process {os.getpid()}")
    assert "Training" in state.sources


def test_speed_and_the_time_left_are_those_of_the_last_minute(path):
    slow = [{"step": n, "time": 10.0 * n, "progress": 1.0 * n} for n in range(1, 101)]
    fast = [{"step": n, "time": 1000.0 + (n - 100), "progress": 100.0 + 4 * (n - 100)}
            for n in range(101, 201)]  # fmt: skip
    write_lines(path, header(until=600.0, batch_size=8), *slow, *fast)
    state = read(path)
    assert state.steps_per_second == pytest.approx(1.0)
    assert state.samples_per_second == pytest.approx(16.0)  # two workers' small batches
    assert state.left == pytest.approx((600 - 500) / 4)
    assert state.seconds == 1100.0


def test_the_time_of_all_starts_counts_but_not_the_pause(path):
    line = {"step": 1, "time": 5.0, "progress": 1.0}
    again = [{"step": 3, "time": 2.0, "progress": 3.0}, {"step": 4, "time": 4.0, "progress": 4.0}]
    write_lines(path, header(until=10), line, {**line, "step": 2, "time": 10.0, "progress": 2.0})
    write_lines(path, header(until=10, step=2, resumed=True), *again)
    state = read(path)
    assert (state.seconds, state.starts) == (14.0, 2)
    assert state.left == pytest.approx(12.0)  # half a step a second
    assert [event.text for event in state.events] == ["started again after step 2"]
    assert read_record(path).column("time")[-1] == state.seconds


def test_a_run_that_goes_back_drops_what_came_after(path):
    lines = [{"step": n, "time": 1.0 * n, "loss": 1.0 * n} for n in range(1, 101)]
    write_lines(path, header(batch_size=2), *lines, {"step": 51, "time": 101.0, "loss": 7.0})
    job = WatchedJob(path)
    job.read()
    curves = job.curves()
    assert curves["x"]["step"] == [*range(1, 51), 51]
    assert curves["x"]["samples"][-1] == 51 * 2 * 2
    assert curves["mean"]["loss"][-1] == 7.0
    assert job.state().events[0].text == "went back from step 100 to step 51"


def test_faults_and_changes_of_the_workers_are_events(path):
    training = Training()
    with Record(path, training) as record:
        for values in ({}, {"workers": 3, "undone": 1, "members": "0 1 3"}, {"nonfinite": 2}, {}):
            training.step(**values)
            record.step(loss=math.nan if values == {"nonfinite": 2} else 1.0)
    state = read(path)
    assert [event.text for event in state.events] == [
        "1 round undone: a worker was lost in the sync round",
        "workers: 4 → 3 (0 1 3)",
        "2 steps with a gradient that was not finite",
        "loss is nan",
    ]
    assert [event.step for event in state.events] == [2, 2, 3, 3]
    assert state.faults == {"undone": 1, "nonfinite": 2}
    assert state.members == "0 1 3"


def test_what_a_steps_time_goes_into(path):
    each = {"loading_seconds": 0.1, "compute_seconds": 0.5, "sync_seconds": 0.2}
    each["update_seconds"] = 0.1
    lines = [{"step": n, "time": 1.0 * n, "waited": 0.05 * n, **each} for n in range(1, 50)]
    write_lines(path, header(keys=[*each, "waited"]), *lines)
    parts = read(path).parts
    assert list(parts) == ["loading", "compute", "sync", "update", "rounds", "other"]
    assert [round(parts[part], 6) for part in parts] == [0.1, 0.5, 0.2, 0.1, 0.05, 0.05]


def test_without_measured_times_they_are_those_of_ramps_fit(path):
    fit = {"pass_seconds": 0.1, "fixed_seconds": 0.3, "passes": 4}
    write_lines(path, header(keys=list(fit)), *({"step": n, "time": n, **fit} for n in range(9)))
    parts = read(path).parts
    assert {part: round(seconds, 6) for part, seconds in parts.items()} == {
        "passes": 0.4, "fixed": 0.3, "other": 0.3,
    }  # fmt: skip


# -- running, ended, died ------------------------------------------------------------------------


def test_a_job_that_ended_says_so_and_one_that_failed_says_why(path):
    with Record(path) as record:
        record.step(loss=1.0)
        assert read(path).state == "running"
    assert read(path).state == "ended"
    assert read_record(path).header["error"] is None
    with pytest.raises(RuntimeError), Record(path) as record:
        assert read(path).state == "running"
        record.step(loss=1.0)
        raise RuntimeError("out of memory")
    state = read(path)
    assert (state.state, state.text) == ("failed", "ended by RuntimeError: out of memory")
    with pytest.raises(SystemExit), Record(path) as record:
        raise SystemExit(0)
    assert read(path).state == "ended"


def test_a_job_that_was_killed_has_died(path):
    child = os.fork()
    if child == 0:
        record = Record(path)
        while True:
            record.step(loss=0.5)
            time.sleep(0.01)
    try:
        job, until = WatchedJob(path), time.monotonic() + 30
        while job.state().step < 5 and time.monotonic() < until:
            job.read()
        assert job.state().state == "running"
    finally:
        os.kill(child, signal.SIGKILL)
    while job.state().state != "died" and time.monotonic() < until:  # a zombie has died, too
        job.read()
    os.waitpid(child, 0)
    assert job.state().text == "its process is gone, and the record was not closed"


def test_a_job_elsewhere_is_silent_after_ten_times_its_usual_time(path):
    lines = [{"step": n, "time": 6.0 * n} for n in range(1, 20)]
    write_lines(path, header(process={"host": "other", "pid": 1, "boot": "x"}), *lines)
    job = WatchedJob(path)
    job.read()
    changed = path.stat().st_mtime
    assert job.state(changed + 59).state == "running"
    state = job.state(changed + 61)
    assert state.state == "silent"
    assert state.text == "no line for 61 s; usual are 6 s; its process cannot be seen from here"


def test_another_process_of_the_same_number_is_not_the_job():
    here = this_process()
    assert is_alive(here) is True
    assert is_alive({**here, "started": here["started"] + 1}) is False
    assert is_alive({**here, "pid": 2**22 + 1}) is False
    for unknown in ({**here, "boot": "x"}, {**here, "namespace": "y"}, {}, None, {"pid": "1"}):
        assert is_alive(unknown) is None


def test_a_folder_shows_the_records_that_appear_in_it(tmp_path, monkeypatch):
    jobs = Jobs([tmp_path, tmp_path / "later.jsonl"])
    assert [job.state().state for job in jobs.read()] == ["waiting"]
    with Record(tmp_path / "new.jsonl"):
        pass
    monkeypatch.setattr(jobs, "_looked", -1e9)  # two seconds later
    assert [job.path.name for job in jobs.read()] == ["later.jsonl", "new.jsonl"]


# -- records that somebody has made up -------------------------------------------------------------

ODD = (
    "<a href='javascript:alert(1)'>x</a>", "\ud800", "\x1b[31m", "", None, True, -1, 2**70, 10**400,
    -(10**400), 1e308, "nan", "inf", [], [[]], [[1], 2], {}, {"a": {}}, [10**400, "x", None],
)  # fmt: skip


@pytest.mark.parametrize(
    "key", ["progress", "loss", "scale", "gain", "waited", "workers", "members"]
)
def test_any_value_can_be_watched(path, key):
    first = {"step": 0, "time": 0.0, "gain": 1.0, "scale": 1.0, "loss": 1.0, key: 0.5}
    lines = [{**first, "step": n, "time": 1.0 * n, key: value} for n, value in enumerate(ODD, 1)]
    write_lines(path, header(batch_size=2, until=10), first, *lines)
    job = WatchedJob(path)
    job.read()
    state = job.state()
    assert state.step == len(ODD)
    for found in (state.__dict__ | {"events": ()}, job.curves()):
        json.dumps(watch.to_strict_json(found), allow_nan=False)


@pytest.mark.parametrize(
    "key", ["batch_size", "until", "config", "sources", "process", "error", "date"]
)
def test_any_header_can_be_watched(path, key):
    for value in ODD:
        path.unlink(missing_ok=True)
        write_lines(path, header(**{key: value}), *({"step": n, "time": n} for n in range(3)))
        write_lines(path, header(ended="", **{key: value}))
        job = WatchedJob(path)
        job.read()
        assert job.state().state in ("ended", "failed")
        json.dumps(watch.to_strict_json(job.state().__dict__ | {"events": ()}), allow_nan=False)


def test_examples_run():
    for module in (_points, _jobs, watch):
        assert doctest.testmod(module).failed == 0
