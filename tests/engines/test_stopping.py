"""`mh.stopping`: real signals to real processes, and one answer on all ranks."""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from manyhands._ranks.stop_notice import stop_notice
from manyhands.engines._stopping import listener

STEPS = 12


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def train(make, when, *, wrap=DistributedDataParallel, signalled=0, number=signal.SIGTERM):
    """Train until `stopping`; rank `signalled` gets its signal before backward of step `when`."""
    model = net()
    optimizer = make(model)
    module = wrap(model) if wrap is not None else model
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        loss = (module(x) - x.sum(dim=1, keepdim=True)).square().mean()
        if step == when and dist.get_rank() == signalled:
            os.kill(os.getpid(), number)
        loss.backward()
        optimizer.step()
        if mh.stopping(optimizer):
            break
    return step, model.weight.detach().clone(), stop_notice.reason


def all_alike(results):
    steps, weights, _ = zip(*results, strict=True)
    assert len(set(steps)) == 1, steps
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    return steps[0]


def plain(model):
    return SGD(model.parameters(), lr=0.01)


RULES = {
    "AdaScale": lambda model: mh.AdaScale(plain(model)),
    "AdaScale of OSS": lambda model: mh.AdaScale(mh.OSS(model.parameters(), optim=SGD, lr=0.01)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_carries_the_notice_in_its_own_collective(name):
    def steps_and_votes():
        mh.stopping()  # listens from here on; this first vote is the only one
        from manyhands.engines import _stopping

        result = train(RULES[name], 5, signalled=1)
        return [*result, len(_stopping._votes)]

    results = run_ranks(2, steps_and_votes)
    assert all_alike([result[:3] for result in results]) == 5  # in the very step
    assert [reason for _, _, reason, _ in results] == ["", "SIGTERM"]
    assert [votes for *_, votes in results] == [1, 1]


def test_without_a_rule_ranks_vote_beside_the_next_step():
    def ranks():
        listener.start()
        return train(plain, 5, signalled=2)

    assert all_alike(run_ranks(3, ranks)) == 6


@on_ranks(2)
def test_a_vote_is_one_collective_of_one_number_per_step():
    from manyhands.engines import _stopping

    listener.start()
    mh.stopping()
    (vote,) = _stopping._votes.values()
    begun = []
    start = type(vote._ranks).start_all_reduce

    def counted(self, tensor):
        begun.append(tensor.numel())
        return start(self, tensor)

    type(vote._ranks).start_all_reduce = counted
    train(plain, 99)
    assert begun == [1] * STEPS


def test_a_file_that_appears_is_a_notice(tmp_path, monkeypatch):
    path = tmp_path / "stop"
    monkeypatch.setattr("manyhands._ranks.stop_notice.LOOK", 0.0)

    def ranks():
        os.environ["MANYHANDS_STOP_FILE"] = str(path)
        listener.start()
        if dist.get_rank() == 1:
            path.touch()
        return train(RULES["AdaScale"], 99)

    results = run_ranks(2, ranks)
    assert all_alike(results) == 0
    assert results[1][2] == str(path)


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", None])
def test_sigusr1_is_a_notice_under_slurm_and_nowhere_else(variable, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if variable:
        monkeypatch.setenv(variable, "4711")
    before = signal.getsignal(signal.SIGUSR1)
    listener.start()
    assert (signal.getsignal(signal.SIGUSR1) is before) == (variable is None)
    listener.stop()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_one_rank_alone_knows_at_once():
    assert not mh.stopping()
    os.kill(os.getpid(), signal.SIGTERM)
    assert mh.stopping()
    assert mh.stopping(SGD([torch.zeros(1, requires_grad=True)], lr=0.1))


@on_ranks(2)
def test_a_new_default_group_has_a_vote_of_its_own():
    listener.start()
    train(plain, 1)
    stop_notice.clear()
    other = dist.new_group([0, 1])
    assert [mh.stopping(process_group=other) for _ in range(3)] == [False] * 3


# -- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"overlap": 2}, {"fragments": 2}, {"warmup": 12}])
def test_blocks_stop_at_the_end_of_a_sync_round(options):
    def ranks():
        listener.start()
        make = lambda model: mh.DiLoCo(plain(model), every=4, **options)  # noqa: E731
        step, weight, reason = train(make, 5, wrap=None, signalled=1)
        return step, weight, reason

    results = run_ranks(2, ranks)
    # steps count from 0: the round after the eighth step, or the one that is next
    last = {"overlap": 9, "fragments": 5, "warmup": 5}.get(next(iter(options), ""), 7)
    steps = [step for step, *_ in results]
    assert steps == [last, last]


def test_a_round_that_was_saved_in_flight_brings_no_notice_back(tmp_path):
    def ranks(stop):
        listener.start()
        model = net()
        optimizer = mh.DiLoCo(plain(model), every=2, overlap=1)
        saved = tmp_path / f"{dist.get_rank()}.pt"
        if not stop:
            optimizer.load_state_dict(torch.load(saved, weights_only=True))
        elif dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2):
            model(torch.full((1, 4), 1.0 + dist.get_rank())).square().sum().backward()
            optimizer.step()
        if stop:
            torch.save(optimizer.state_dict(), saved)
        return mh.stopping(optimizer)

    run_ranks(2, ranks, True)
    assert run_ranks(2, ranks, False) == [False, False]


# -- processes that load data ----------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        return torch.full((4,), float(i))


@on_ranks(1)
def test_processes_that_load_data_outlive_a_signal_to_the_whole_group():
    """torchrun's agent, systemd and Slurm signal every process that a rank has started."""
    os.setpgid(0, 0)
    listener.start()
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=1)
    seen = 0
    for batch in loader:
        seen += len(batch)
        if seen == 40:
            os.killpg(0, signal.SIGTERM)
            time.sleep(0.2)
        if mh.stopping() and seen == 400:
            break
    assert (seen, stop_notice.reason) == (400, "SIGTERM")


def test_other_children_are_ended_as_ever():
    def rank():
        listener.start()
        pid = os.fork()
        if pid == 0:
            listener.stop()
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with contextlib.suppress(ProcessLookupError):
        assert run_ranks(1, rank) == [-signal.SIGTERM]
