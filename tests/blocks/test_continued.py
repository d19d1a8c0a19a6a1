"""A crew that continues from a checkpoint, and a worker that joins it afterwards."""

import time

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import manyhands as mh
from helpers.crew_workers import Store, Workers, limit
from manyhands.fairseq import FairseqBMUF

SAVED, STEPS = 20, 300
OTHER = -7.0  # a weight that is not the crew's


def build(crew):
    """A weight that goes down a slope of 1: it is -n after n steps. (Its momentum stays 0.)"""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, mh.LocalSGD(SGD(model.parameters(), lr=1.0), every=5, crew=crew)


def train(model, optimizer, until):
    while optimizer.steps < until:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        time.sleep(0.002)


def errors_of_loading(model, optimizer):
    """What `load_state_dict` says; it changes nothing."""
    said, before = [], (optimizer.steps, model.weight.item())
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does
    assert (optimizer.steps, model.weight.item()) == before
    earlier = build(None)[1].state_dict()
    for state in (earlier, SGD(model.parameters(), lr=1.0).state_dict()):
        with pytest.raises(RuntimeError) as caught:
            optimizer.load_state_dict(state)
        said.append(str(caught.value))
        assert (optimizer.steps, model.weight.item()) == before
    return said


class Continuing(Workers):
    """Workers that all call `load` at their start, and log what follows from it."""

    def work(self, make_crew, log, load):
        model, optimizer = build(make_crew())
        at = optimizer.steps
        said = errors_of_loading(model, optimizer) if at else []
        if not at:  # a run begins here also if it counts from another step
            FairseqBMUF.set_num_updates(optimizer, 5)
        found = load(self.folder / "run", model, optimizer, at > 0)
        facts = {"at": at, "said": said, "found": found}
        log("in", **facts, steps=optimizer.steps, weight=model.weight.item())
        while optimizer.steps < STEPS:
            train(model, optimizer, optimizer.steps + 5)
            log("block", steps=optimizer.steps)
        optimizer.finish()
        log("done", weight=model.weight.item())


def run_with_a_late_worker(folder, load, reported=True):
    """Start two workers, and one of them again; return the events of both."""
    with Store() as store, Continuing(store, folder, expected=2) as workers:
        workers.start(range(2), load)
        workers.until(lambda: (workers.last(0, "block", "steps") or 0) >= 40, 30.0)
        workers.kill(1, report=reported)
        workers.start([1], load)
        workers.finish(60.0)
        return [workers.events(0), workers.events(1)]


def of_kind(events, kind):
    return [event for event in events if event["event"] == kind]


def save_a_start(folder, **values):
    model, optimizer = build(mh.Crew())
    train(model, optimizer, SAVED)
    job = mh.start(checkpoints=folder / "run", process_group=False)
    job.save(model=model, optimizer=optimizer, step=SAVED, **values)


def by_job(path, model, optimizer, late=False):
    job = mh.start(checkpoints=path, process_group=False)
    return job.load(model=model, optimizer=optimizer)


def by_load(path, model, optimizer, late=False):
    return mh.load(path, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("load", "reported"),
    [
        (by_job, True),
        pytest.param(by_job, False, marks=pytest.mark.long),
        (by_load, True),
        pytest.param(by_load, False, marks=pytest.mark.long),
    ],
)
def test_a_late_worker_that_loads_as_all_do_keeps_the_state_of_the_crew(tmp_path, load, reported):
    """It is told its own values as the others were, and the crew's step.

    If nobody reports the death, the new worker is let in with the round that is repeated.
    """
    save_a_start(tmp_path, epoch=3, names=["a", "b"])
    first, second = run_with_a_late_worker(tmp_path, load, reported)
    own = {"epoch": 3, "names": ["a", "b"]}
    for begun in (of_kind(first, "in")[0], of_kind(second, "in")[0]):
        assert (begun["at"], begun["found"]) == (0, {"step": SAVED, **own})
        assert (begun["steps"], begun["weight"]) == (SAVED, -SAVED)
    joined = of_kind(second, "in")[-1]
    assert joined["at"] >= 40
    assert joined["found"] == {"step": joined["at"], **own}
    assert (joined["steps"], joined["weight"]) == (joined["at"], -joined["at"])
    for said in joined["said"]:
        assert "this worker has joined a running job" in said
        assert "if optimizer.steps == 0" in said
    assert len(joined["said"]) == 2
    for events in (first, second):
        assert of_kind(events, "done")[-1]["weight"] == -STEPS


def of_model_alone(path, model, optimizer, late):
    return mh.load(path, model=model) if late else by_load(path, model, optimizer)


def as_weights(path, model, optimizer, late):
    weights = {"weight": torch.full((1, 1), OTHER)}
    return list(mh.load_weights(model, weights)) if late else by_load(path, model, optimizer)


@pytest.mark.parametrize("load", [of_model_alone, as_weights])
def test_a_model_that_a_late_worker_loads_alone_does_not_enter_the_mean(tmp_path, load):
    """The next round would count the way back to the checkpoint as training."""
    save_a_start(tmp_path)
    first, second = run_with_a_late_worker(tmp_path, load)
    joined = of_kind(second, "in")[-1]
    assert joined["weight"] == -joined["at"] < -SAVED
    for events in (first, second):
        assert of_kind(events, "done")[-1]["weight"] == -STEPS


def test_a_late_worker_without_a_checkpoint_is_told_as_much_as_the_others(tmp_path):
    first, second = run_with_a_late_worker(tmp_path, by_job)
    assert [event["found"] for event in of_kind(first, "in") + of_kind(second, "in")] == [{}] * 3


class Saving(Workers):
    """Workers that call `job.save` after each sync round, and log what it has returned."""

    def work(self, make_crew, log):
        job = mh.start(checkpoints=self.folder / "run", process_group=False)
        job.crew = make_crew()
        model, optimizer = build(job.crew)
        log("in", steps=optimizer.steps)
        told = limit(self.folder, None)
        while optimizer.steps < told():
            train(model, optimizer, optimizer.steps + 1)
            if optimizer.steps % 5 == 0:
                path = job.save(model=model, optimizer=optimizer, step=optimizer.steps)
                log("saved", steps=optimizer.steps, path=path and path.name)
        optimizer.finish()


def test_the_round_that_lets_in_the_worker_with_the_lowest_number_is_saved_too(tmp_path):
    """It comes into the crew with that round, and so does not call `job.save` after it."""
    with Store() as store, Saving(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([1, 2])
        workers.until(lambda: (workers.last(1, "saved", "steps") or 0) >= 20)
        workers.start([0])
        workers.until(lambda: (workers.last(0, "saved", "steps") or 0) > 0)
        workers.finish_together(10, 30.0)
        joined = workers.events(0, "in")[0]["steps"]
        saved = [event for number in range(3) for event in workers.events(number, "saved")]
    savers = {}
    for event in saved:
        savers.setdefault(event["steps"], []).append(event["path"])
    assert joined in savers
    for steps, paths in savers.items():
        assert sum(path is not None for path in paths) == 1, (steps, joined, paths)


# -- a late worker, in this process ----------------------------------------------------------------


class Steps:
    """A user's object with state."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def everything(crew):
    """A run with a model that has a buffer and frozen weights, momentum, a schedule and data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    model[1].bias.requires_grad_(False)
    sgd = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = mh.DiLoCo(sgd, every=2, crew=crew, model=model)
    cursor = mh.Cursor(torch.linspace(-1.0, 1.0, 64), 4, optimizer=optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": StepLR(sgd, step_size=1, gamma=0.5),
        "cursor": cursor,
        "own": Steps(),
    }


def learn(run, steps):
    for _, batch in zip(range(steps), run["cursor"], strict=False):
        run["model"](batch[:, None]).square().mean().backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        run["scheduler"].step()
        run["own"].count += 1


def test_only_the_common_state_of_a_late_worker_is_not_from_the_checkpoint(tmp_path):
    saved = everything(mh.Crew())
    learn(saved, 4)
    with torch.no_grad():
        saved["model"][1].bias.fill_(2.0)
    mh.save(tmp_path, **saved, step=4, epoch=0)
    learn(saved, 6)  # the crew has gone on

    late = everything(mh.Crew())
    sync = late["optimizer"]._sync
    packed = saved["optimizer"]._sync.common.pack(saved["optimizer"]._sync.state)
    sync.state = sync.common.take_over(bytearray(packed), sync.state)
    received = {name: value.clone() for name, value in late["model"].state_dict().items()}
    position = late["cursor"].position

    found = mh.load(tmp_path, **late)
    assert (found["step"], found["epoch"]) == (10, 0)
    assert late["optimizer"].steps == 10
    assert late["cursor"].position == position == saved["cursor"].position
    now = late["model"].state_dict()
    assert now.pop("1.bias").item() == 2.0 != received.pop("1.bias").item()  # which was not sent
    for name, value in received.items():
        assert torch.equal(now[name], value), name
    assert late["own"].count == late["scheduler"].last_epoch == 4
    assert late["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)
    assert all("momentum_buffer" in entries for entries in late["optimizer"].state.values())
    theirs = saved["optimizer"]._sync.anchor.buckets
    for own, other in zip(sync.anchor.buckets, theirs, strict=True):
        assert torch.equal(own.anchor, other.anchor)
        for memory, other_memory in zip(own.memories, other.memories, strict=True):
            assert torch.equal(memory, other_memory)

    learn(late, 1)  # a worker like all others from here on
    before = late["model"][0].weight.detach().clone()
    mh.load(tmp_path, model=late["model"])
    assert not torch.equal(late["model"][0].weight, before)
