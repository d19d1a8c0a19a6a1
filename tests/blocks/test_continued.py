"""A crew that continues from a checkpoint, and a worker that joins it afterwards."""

import time

import pytest
import torch
from torch import nn
from torch.optim import SGD

import manyhands as mh
from helpers.crew_workers import Log, Store, Workers, fork
from manyhands.fairseq import FairseqBMUF

SAVED, STEPS = 20, 300


def build(crew):
    """A weight that goes down a slope of 1: it is -n after n steps."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, mh.LocalSGD(SGD(model.parameters(), lr=1.0), every=5, crew=crew)


def train(model, optimizer, until):
    while optimizer.steps < until:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        time.sleep(0.002)


def errors_of_loading(folder, model, optimizer):
    """What `mh.load` and `load_state_dict` say; they change nothing."""
    said, before = [], (optimizer.steps, model.weight.item())
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does
    assert (optimizer.steps, model.weight.item()) == before
    earlier = build(None)[1].state_dict()
    for load in (
        lambda: mh.load(folder, model=model, optimizer=optimizer),
        lambda: optimizer.load_state_dict(earlier),
        lambda: optimizer.load_state_dict(SGD(model.parameters(), lr=1.0).state_dict()),
    ):
        with pytest.raises(RuntimeError) as caught:
            load()
        said.append(str(caught.value))
        assert (optimizer.steps, model.weight.item()) == before
    return said


class Continuing(Workers):
    """Workers that go on from the checkpoint in `run` if they begin the run, and log how."""

    def start(self, numbers):
        for number in numbers:
            incarnation = self.incarnations[number] = self.incarnations.get(number, 0) + 1
            log = Log(self.folder / f"{number}.{incarnation}.jsonl")

            def work(number=number, log=log):
                crew = mh.Crew(self.store.address, number=number, **self.options)
                model, optimizer = build(crew)
                at = optimizer.steps
                job = mh.start(checkpoints=self.folder / "run", process_group=False)
                said = errors_of_loading(job.folder, model, optimizer) if at else []
                if not at:  # a run begins here also if it counts from another step
                    FairseqBMUF.set_num_updates(optimizer, 5)
                found = job.load(model=model, optimizer=optimizer)
                facts = {"at": at, "said": said, "found": found}
                log("in", **facts, steps=optimizer.steps, weight=model.weight.item())
                while optimizer.steps < STEPS:
                    train(model, optimizer, optimizer.steps + 5)
                    log("block", steps=optimizer.steps)
                optimizer.finish()
                log("done", weight=model.weight.item())

            self.pids[number] = fork(work, self.folder / f"{number}.errors")


@pytest.mark.long
@pytest.mark.parametrize("reported", [True, False])
def test_only_workers_that_begin_the_run_load_the_checkpoint(tmp_path, reported):
    """A worker that came later would be set back behind the others, and could not keep a round.

    If nobody reports the death, the new worker is let in with the round that is repeated.
    """
    model, optimizer = build(mh.Crew())
    train(model, optimizer, SAVED)
    job = mh.start(checkpoints=tmp_path / "run", process_group=False)
    job.save(model=model, optimizer=optimizer, step=SAVED)
    with Store() as store, Continuing(store, tmp_path, expected=2) as workers:
        workers.start(range(2))
        workers.until(lambda: (workers.last(0, "block", "steps") or 0) >= 40, 30.0)
        for number in range(2):
            begun = workers.events(number, "in")[0]
            assert (begun["at"], begun["found"]) == (0, {"step": SAVED})
            assert (begun["steps"], begun["weight"]) == (SAVED, -SAVED)
        workers.kill(1, report=reported)
        workers.start([1])
        workers.finish(60.0)
        joined = workers.events(1, "in")[-1]
        assert joined["at"] >= 40
        assert joined["found"] == {}
        assert (joined["steps"], joined["weight"]) == (joined["at"], -joined["at"])
        for said in joined["said"]:
            assert "this worker has joined a run that goes on" in said
            assert "if optimizer.steps == 0" in said
        assert len(joined["said"]) == 3
        assert [workers.last(number, "done", "weight") for number in range(2)] == [-STEPS] * 2
