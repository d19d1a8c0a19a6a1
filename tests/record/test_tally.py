"""What the time of a crew's workers went into: in records of known seconds, and in a crew."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import manyhands as mh
from manyhands.record import _record, read_record
from manyhands.record._tally import CAUSES, WorkerTime, tally, tally_faults
from manyhands.report import write_report
from manyhands.watch import Jobs, serve

NOW = 1_700_000_000.0  # when the first processes begin


def header(began, opened, **more):
    return {"version": 1, "began": NOW + began, "opened": NOW + opened, **more}


class Worker:
    """Writes a record: `spend` says what the time until the next line went into."""

    def __init__(self, began, opened, **spent):
        self.time, self.closed = WorkerTime(), False
        self.begin(began, opened, **spent)

    def begin(self, began, opened, rounds=0, **spent):
        self.time.take_header(header(began, opened))
        self.values = {"time": 0.0, "rounds": rounds, "own_steps": 0, "dropped": 0}
        self.spent = spent

    def step(self, number, seconds, rounds=0, dropped=0, **spent):
        self.spent = {k: self.spent.get(k, 0.0) + spent.get(k, 0.0) for k in self.spent | spent}
        more = {"time": seconds + sum(spent.values()), "rounds": rounds, "own_steps": 1}
        more["dropped"] = dropped
        self.values = {key: value + more[key] for key, value in self.values.items()}
        self.time.take({"step": number, **self.values, "crew_seconds": dict(self.spent)})

    def close(self):
        self.time.take_header(header(0, 0, ended="now", error=None))


def steps(worker, numbers, seconds=1.0, **last):
    """Take steps of a block, and hold its round after the last one."""
    for number in numbers[:-1]:
        worker.step(number, seconds)
    worker.step(numbers[-1], seconds, rounds=1, **last)


def nonzero(seconds):
    return {cause: round(value, 6) for cause, value in seconds.items() if value > 1e-6}


def test_every_cause_has_the_seconds_that_it_took():
    """Worker 1 is killed in its second block, and worker 2 is stopped in the third."""
    survivor = Worker(0.0, 3.0, joining=1.0)
    killed, stopped = Worker(0.0, 4.0, joining=0.5), Worker(0.0, 3.5)
    steps(survivor, [1, 2], sync=0.6)  # arrives 0.5 s before the last
    steps(killed, [1, 2], sync=0.1)
    steps(stopped, [1, 2], sync=0.2)

    killed.step(3, 1.0)  # its last line, at 7.1
    steps(survivor, [3, 4], waiting=2.0, connecting=0.3, repeating=0.4)
    steps(stopped, [3, 4], waiting=1.5, connecting=0.3, repeating=0.4)
    killed.begin(8.1, 11.1, rounds=2, joining=0.7, connecting=0.2)  # starting: 3.0 - 0.9

    steps(survivor, [5, 6], waiting=2.5, connecting=0.1, sync=0.3)
    steps(killed, [5, 6], sync=0.3)
    stopped.step(5, 1.5)
    stopped.step(6, 1.5, rounds=1, dropped=2, away=5.0, joining=1.0, connecting=0.1)
    for worker in (survivor, killed, stopped):
        worker.close()

    found = tally({"0": survivor.time, "1": killed.time, "2": stopped.time})
    assert {name: nonzero(seconds) for name, seconds in found.workers.items()} == {
        "0": {
            "setup": 3.0,
            "useful": 6.4,  # six steps, and two exchanges of 0.1 and 0.3
            "idle": 0.5,
            "waiting": 4.5,
            "connecting": 0.4,
            "repeating": 0.4,
        },
        "1": {
            "setup": 4.0,
            "useful": 4.4,
            "thrown_away": 1.0,
            "away": 1.0,
            "starting": 2.1,
            "joining": 0.7,
            "connecting": 0.2,
        },
        "2": {
            "setup": 3.5,
            "useful": 4.1,
            "idle": 0.1,
            "waiting": 1.5,
            "connecting": 0.4,
            "repeating": 0.4,
            "thrown_away": 3.0,
            "away": 5.0,
            "joining": 1.0,
        },
    }
    walls = [worker.time.end - NOW for worker in (survivor, killed, stopped)]
    assert sum(found.total.values()) == pytest.approx(sum(walls))
    assert sum(found.shares().values()) == pytest.approx(1.0)
    assert found.has_faults
    assert str(found).startswith("steps that count 31.3%, first start 22.1%, ")


def test_a_worker_that_never_comes_back_is_away_until_the_last_line_of_the_others():
    survivor, killed = Worker(0.0, 1.0), Worker(0.0, 1.0)
    steps(survivor, [1, 2])
    steps(killed, [1, 2])
    killed.step(3, 1.0)  # at 4.0
    assert not tally({"0": survivor.time, "1": killed.time}).has_faults  # in the middle of a block
    for block in ([3, 4], [5, 6]):
        steps(survivor, block)  # until 7.0
    found = tally({"0": survivor.time, "1": killed.time})
    assert nonzero(found.workers["1"]) == {
        "setup": 1.0,
        "useful": 2.0,
        "thrown_away": 1.0,
        "away": 3.0,
    }


def test_a_run_that_was_interrupted_and_is_continued_later_had_nobody_away_meanwhile():
    workers = [Worker(0.0, 1.0) for _ in range(2)]
    for day in (0.0, 86_400.0):
        for worker in workers:
            if day:
                worker.begin(day, day + 1.0, rounds=1)
            steps(worker, [1, 2])
    found = tally({str(n): worker.time for n, worker in enumerate(workers)})
    assert nonzero(found.workers["0"]) == {"setup": 1.0, "useful": 4.0, "starting": 1.0}


def test_a_worker_that_leaves_early_makes_nobody_lost():
    """Lines are read between those of two workers, so one may be a round behind."""
    workers = [Worker(0.0, 1.0) for _ in range(3)]
    for worker in workers:
        steps(worker, [1, 2])
    workers[2].close()
    for worker in workers[:2]:
        steps(worker, [3, 4])
    steps(workers[0], [5, 6])
    assert not tally({str(n): worker.time for n, worker in enumerate(workers)}).has_faults


def test_a_pause_that_is_noticed_one_line_late_is_not_counted_twice():
    worker = Worker(0.0, 1.0)
    worker.step(1, 6.0)  # 5 s of them stopped
    worker.step(2, -4.0, rounds=1, away=5.0)
    assert nonzero(tally({"0": worker.time}).workers["0"]) == {
        "setup": 1.0,
        "useful": 2.0,
        "away": 5.0,
    }


def test_a_run_that_ended_well_and_is_continued_has_lost_nothing():
    worker = Worker(0.0, 1.0)
    steps(worker, [1, 2])
    worker.close()
    worker.begin(1000.0, 1001.0)
    steps(worker, [3, 4])
    found = tally({"0": worker.time})
    assert nonzero(found.workers["0"]) == {"setup": 2.0, "useful": 4.0}
    assert not found.has_faults


def test_records_without_crews_show_nothing(tmp_path):
    with mh.Record(tmp_path / "plain.jsonl") as record:
        record.step(loss=1.0)
    run = read_record(tmp_path / "plain.jsonl")
    assert not run.worker_time.in_crew
    assert tally_faults({run.path: run.worker_time}) == {}


def test_a_strangers_numbers_change_nothing():
    time = WorkerTime()
    time.take_header({"opened": "now", "began": []})
    time.take({"step": 1, "time": 1.0, "crew_seconds": {"sync": 1.0}})
    time.take_header({"opened": NOW, "began": float("nan")})
    time.take({"step": 1, "time": 1.0, "crew_seconds": {"sync": "x", "away": -1}, "rounds": None})
    time.take({"step": 2, "time": 2.0, "crew_seconds": [1]})
    found = tally({"0": time}).workers["0"]
    assert found.keys() == CAUSES.keys()
    assert nonzero(found) == {"useful": 1.0}


class Member:
    """A member of a crew in which a worker was lost in the second round."""

    lost = False

    def __init__(self):
        self.values = {"step": 0, "rounds": 0, "own_steps": 0, "dropped": 0}

    def snapshot(self):
        spent = {"joining": 0.001, **({"waiting": 0.002} if self.lost else {})}
        return {**self.values, "crew_seconds": spent}

    def train(self, path):
        with mh.Record(path, self) as record:
            for step in range(1, 9):
                self.values |= {"step": step, "rounds": step // 4, "own_steps": step}
                self.lost = step == 8
                time.sleep(0.001)
                record.step()


def test_report_and_watch_show_what_a_crew_has_lost(tmp_path, monkeypatch):
    for package in ("typer", "rich", "plotly"):
        pytest.importorskip(package, reason=f'{package} is missing: pip install "manyhands[cli]"')
    from typer.testing import CliRunner

    from manyhands.cli import app

    monkeypatch.setattr(_record, "time_of_start", lambda: None)  # not that of this test
    paths = [str(tmp_path / f"worker{number}.jsonl") for number in range(2)]
    for path in paths:
        Member().train(path)
    with mh.Record(tmp_path / "alone" / "plain.jsonl") as record:
        record.step(loss=1.0)
    alone = str(tmp_path / "alone" / "plain.jsonl")
    page = tmp_path / "report.html"
    said = CliRunner().invoke(app(), ["report", *paths, alone, "--out", str(page)]).output
    assert said.count("time of the workers in") == 1 and "rounds with a lost worker " in said
    table = page.read_text("utf-8").partition('<section class="table faults">')[2]
    assert [f'<th scope="row">{name}</th>' in table for name in ("all", "worker0", "worker1")]
    assert "rounds with a lost worker" in table and "<td>0.002 s</td>" in table
    told = CliRunner().invoke(app(), ["watch", "--once", *paths, alone]).output
    assert told.count("time of the workers in") == 1
    with serve(Jobs([tmp_path]), 0) as server:
        crews = json.loads(server.answer("/jobs")[0])["crews"]
    assert [*crews] == [str(tmp_path)] and "rounds with a lost worker " in crews[str(tmp_path)]
    assert 'class="table faults"' not in write_report(alone, page).read_text("utf-8")


SCRIPT = """
import time
import torch
import manyhands as mh

crew = mh.Crew()
torch.manual_seed(crew.number)
model = torch.nn.Linear(4, 1)
optimizer = mh.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.01), every=10, crew=crew)
with mh.Record(f"runs/worker{crew.number}.jsonl", optimizer) as record:
    while optimizer.steps < 400:
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.step(loss=loss)
        time.sleep(0.05)
    optimizer.finish()
"""


def lines(path):
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@pytest.mark.long
def test_the_causes_add_up_to_the_time_of_a_real_crew(tmp_path):
    pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')
    (tmp_path / "train.py").write_text(SCRIPT)
    paths = [tmp_path / "runs" / f"worker{number}.jsonl" for number in range(3)]
    code = "from manyhands.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "--workers", "3", "--stall", "1", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as launcher:
        try:
            until = time.monotonic() + 120

            def wait_for(condition):
                while not condition():
                    assert launcher.poll() is None and time.monotonic() < until
                    time.sleep(0.02)

            wait_for(lambda: len(lines(paths[1])) >= 60)
            victim = lines(paths[1])[0]["manyhands"]["process"]["pid"]
            os.kill(victim, signal.SIGSTOP)  # so that the others wait for it in a round
            wait_for(lambda: "waiting" in lines(paths[0])[-1].get("crew_seconds", {}))
            os.kill(victim, signal.SIGKILL)
            assert launcher.wait(120) == 0
        finally:
            launcher.kill()
    runs = [read_record(path) for path in paths]
    found = tally({run.name: run.worker_time for run in runs})
    first = min(lines(path)[0]["manyhands"]["began"] for path in paths)
    wall = max(run.worker_time.end for run in runs) - first
    assert sum(found.total.values()) == pytest.approx(3 * wall, rel=0.03)
    victim, survivor = found.workers["worker1"], found.workers["worker0"]
    assert victim["away"] > 0 and victim["starting"] > 0 and victim["joining"] > 0
    assert 0 < victim["thrown_away"] < 2.0  # a block takes half a second
    assert survivor["waiting"] > 0.1 and survivor["thrown_away"] == survivor["away"] == 0
    assert [*tally_faults({run.path: run.worker_time for run in runs})] == [tmp_path / "runs"]
