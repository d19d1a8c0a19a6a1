"""Crews whose workers are several processes each, as under DDP: they start and end together.

A worker goes down a slope of 1, which its two processes see as the mean of 0.5 and 1.5: after n
steps all parameters are -n, or work is lost.
"""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import manyhands as mh
from helpers.crew_workers import Log, Workers, fork, limit
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._roster import Member, Roster, Version
from test_crew_faults import tell
from test_run_command import Command

NONE_SILENT: frozenset[str] = frozenset()
PARTS = 2


# -- the roster ------------------------------------------------------------------------------------


def waiting(*members, roster=None):
    """A roster at whose door these are: (number of the process, version, workers)."""
    roster = roster or Roster(processes=PARTS)
    for number, version, workers in members:
        roster = roster.ask_to_join(Member(f"{number}.1", Version(version), workers))
    return roster


def test_a_worker_is_there_when_all_of_its_processes_are():
    roster = waiting((0, -1, 7), (1, -1, 7), (3, -1, 9))
    assert not roster.complete(NONE_SILENT, 2)
    assert roster.complete(NONE_SILENT, 2, late=True)
    first = roster.next(NONE_SILENT)
    assert first.workers == (0,) and [m.id for m in first.waiting] == ["3.1"]
    assert not first.keep(1, 0).ended  # no complete worker waits yet
    assert first.ask_to_join(Member("2.1", Version(-1), 9)).keep(1, 0).ended


def test_processes_of_two_lives_are_not_one_worker():
    roster = waiting((0, 4, 7), (1, 4, 7), (2, 4, 8), (3, -1, 9))
    assert roster.next(NONE_SILENT).workers == (0,)


def test_the_source_and_the_joiners_are_workers():
    roster = waiting((0, -1, 1), (1, -1, 1), (2, 5, 2), (3, 5, 2), (4, 5, 3), (5, 5, 3))
    roster = roster.next(NONE_SILENT)
    assert (roster.workers, roster.source, roster.joiners) == ((0, 1, 2), 1, (0,))


def test_the_rest_of_a_broken_worker_is_not_waited_for():
    roster = waiting((0, 0, 1), (1, 0, 1), (2, 0, 2), (3, 0, 2)).next(NONE_SILENT)
    roster = roster.without("3.1").undo(1, 0)
    roster = waiting((0, 0, 1), (1, 0, 1), roster=roster)
    assert roster.complete(NONE_SILENT, 2) and roster.next(NONE_SILENT).workers == (0,)
    roster = waiting((0, 0, 1), (1, 0, 1), roster=roster.without("2.1"))
    assert roster.complete(frozenset({"2.1"}), 2)


def test_a_member_that_settles_a_round_does_not_learn_yet_that_a_later_one_is_undone():
    roster = waiting((0, 0, 1), (1, 0, 1), (2, 0, 2), (3, 0, 2)).next(NONE_SILENT)
    kept = roster.keep(1, 0)
    assert not kept.ends_with(1, 0, "2.1") and not kept.undo(1, 1).ends_with(1, 0, "2.1")
    assert kept.undo(1, 1).ends_with(1, 1, "2.1")
    assert roster.without("3.1").keep(1, 0).ends_with(1, 0, "2.1")
    later = waiting((0, 1, 1), (1, 1, 1), roster=kept.undo(1, 1)).next(frozenset({"3.1"}))
    assert later.generation == 2 and later.settled(1, 0, "2.1")
    assert not later.ends_with(1, 0, "2.1") and later.ends_with(1, 1, "2.1")


# -- processes -------------------------------------------------------------------------------------


class PairedWorkers(Workers):
    """Each worker is two forked processes; they are known by their own numbers."""

    parts = PARTS

    def start(self, numbers, steps, options):
        for worker in numbers:
            for part in range(PARTS):
                number = PARTS * worker + part
                incarnation = self.incarnations[number] = self.incarnations.get(number, 0) + 1
                file = str(self.folder / f"inner{worker}.{incarnation}")
                log_file = self.folder / f"{number}.{incarnation}.jsonl"

                def work(worker=worker, part=part, file=file, log_file=log_file):
                    store = dist.FileStore(file, PARTS)
                    dist.init_process_group("gloo", store=store, rank=part, world_size=PARTS)
                    crew = Crew(
                        self.store.address,
                        number=worker,
                        inner_group=dist.group.WORLD,
                        **self.options,
                    )
                    train(crew, Log(log_file), limit(self.folder, steps), part, dict(options))

                self.pids[number] = fork(work, self.folder / f"{number}.errors")

    def wait_for_rounds(self, number, rounds):
        self.until(lambda: len(self.events(number, "round")) >= rounds)


def train(crew, log, steps, part, options):
    model = nn.Linear(100, 1, bias=False)
    nn.init.zeros_(model.weight)
    sharded = options.pop("sharded", False)
    inside = mh.FSDP(model) if sharded else DistributedDataParallel(model)
    inner = {} if sharded else {"inner_group": dist.group.WORLD}
    inner_optimizer = SGD(inside.parameters(), lr=1.0)
    optimizer = mh.DiLoCo(inner_optimizer, lr=1.0, momentum=0.0, crew=crew, **inner, **options)
    log("in", steps=optimizer.steps, members=crew.members)
    rounds = optimizer.rounds
    while optimizer.steps < steps():
        optimizer.zero_grad()
        inside(torch.full((1, 100), 0.5 + part)).sum().backward()
        optimizer.step()
        if optimizer.rounds != rounds:
            rounds = optimizer.rounds
            tell(log, "round", optimizer)
        time.sleep(0.005)
    optimizer.finish()
    weight = inside.state_dict()["weight"] if sharded else model.weight
    tell(log, "done", optimizer, values=weight.unique().tolist())


def check(workers, count, steps):
    """Processes with the same place had the same state after each round; nothing is lost."""
    for part in range(PARTS):
        states = {}
        for worker in range(count):
            for e in workers.events(PARTS * worker + part, "round"):
                assert states.setdefault(e["rounds"], e["state"]) == e["state"]
    for number in range(PARTS * count):
        assert workers.events(number, "done")[-1]["values"] == [-float(steps)]


@pytest.mark.parametrize(
    "options",
    [{"every": 5}, {"every": 6, "overlap": 2, "fragments": 2}, {"every": 5, "sharded": True}],
)
def test_pairs_train_and_end_as_one(store, tmp_path, options):
    with PairedWorkers(store, tmp_path, expected=2) as workers:
        workers.start(range(2), 30, options)
        workers.finish()
        check(workers, 2, 30)
        assert workers.events(0, "in")[0]["members"] == [0, 1]


def test_a_pair_that_loses_a_process_ends_and_comes_back_as_one(store, tmp_path):
    with PairedWorkers(store, tmp_path, expected=3, stall=0.6) as workers:
        workers.start(range(3), None, {"every": 5})
        workers.wait_for_rounds(0, 3)
        workers.kill(3)  # unreported: the second process of worker 1
        died = time.monotonic()
        workers.until(lambda: 2 in workers.ended())  # its other process cannot go on, and says so
        said = workers.errors(2)
        assert "another process of worker 1 is lost" in said or "Connection" in said, said
        workers.until(lambda: workers.last(0, "round", "workers") == 2)
        assert workers.events(0, "round")[-1]["time"] - died < 0.6 + 3
        workers.start([1], None, {"every": 5})
        steps = workers.finish_together(100)
        check(workers, 3, steps)
        assert workers.events(0, "done")[-1]["workers"] == 3


def test_a_worker_of_another_size_is_an_error(store, tmp_path):
    message = r"2 process.* each, and this one has 1"
    with PairedWorkers(store, tmp_path, expected=2), pytest.raises(ValueError, match=message):
        Crew(store.address, number=7).join()


def test_the_command_starts_all_processes_of_a_worker_again(tmp_path):
    script = """
        import os, signal, time
        name = os.environ["MANYHANDS_WORKER"] + "." + os.environ["RANK"]
        print(*(os.environ[v] for v in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")))
        with open(name, "a") as file:
            file.write("x")
        if name == "1.0" and os.path.getsize(name) == 1:
            while not os.path.exists("1.1"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        while not (os.path.exists("1.1") and os.path.getsize("1.1") == 2):
            time.sleep(0.01)
    """
    with Command(tmp_path, script, "--workers", "2", "--processes", "2") as command:
        assert command.wait() == 0
    assert command.err.read_text().count("worker 1 ended (SIGKILL) and is started again.") == 1
    assert [(tmp_path / name).read_text() for name in ("0.0", "0.1", "1.0", "1.1")] == [
        "x", "x", "xx", "xx"
    ]  # fmt: skip
    lines = command.out.read_text().splitlines()
    assert {"[0.0] 0 2 0 127.0.0.1", "[0.1] 1 2 1 127.0.0.1", "[1.1] 1 2 3 127.0.0.1"} <= set(lines)
