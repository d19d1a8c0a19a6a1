"""Ranks that wait for others that will not come end soon, and say why."""

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import manyhands as mh
from helpers.programs import run_programs
from helpers.ranks import on_ranks, run_ranks
from manyhands._ranks import presence
from manyhands._ranks.presence import RollCall
from manyhands._ranks.standstill import Standstill
from manyhands.checkpoint import _reader, _writing

# Ranks that wait for long say so, which is no error here.
pytestmark = pytest.mark.filterwarnings("ignore:rank . has called mh.save:UserWarning")


@pytest.fixture
def soon(monkeypatch):
    """All waits are twenty times as short, and so are the pauses between two looks."""
    monkeypatch.setattr(presence, "LOOK", 0.25)
    monkeypatch.setattr(presence, "WATCH", 0.1)
    monkeypatch.setattr(presence, "BLOCKED", 0.5)
    monkeypatch.setattr(_writing, "SAY_AFTER", 2.0)
    monkeypatch.setattr(RollCall, "look_after", 0.5)


def meet(rank, size, folder):
    """Meet in a store that outlives rank 0, as torchrun's does."""
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    mh.start()


def train(rank, steps, kind):
    """Train for a number of steps under AdaScale and DDP, or at a level of `mh.shard`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = SGD(model.parameters(), lr=0.01)
    if kind == "AdaScale":
        model = DistributedDataParallel(model)
        optimizer = mh.AdaScale(optimizer)
    else:
        model, optimizer = mh.shard(model, optimizer, level=kind)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().sum().backward()
        optimizer.step()
    return model, optimizer


# -- ranks that have ended ------------------------------------------------------------------------


def test_save_on_rank_0_alone_ends_once_the_other_process_has(tmp_path, soon):
    def ranks(rank):
        mh.start()
        if rank == 0:
            mh.save(tmp_path, value=1)

    first, other = run_programs(2, ranks)
    assert (first.code, other.code) == (1, 0)
    said = "rank 0 has called mh.save, and rank 1 has ended. Call it on every rank, not under `if"
    assert said in first.said
    assert first.seconds < 10.0


@pytest.mark.long
def test_save_on_rank_0_alone_ends_within_30_seconds(tmp_path):
    def ranks(rank):
        mh.start()
        if rank == 0:
            mh.save(tmp_path, value=1)

    first, _ = run_programs(2, ranks)
    assert "rank 1 has ended" in first.said
    assert first.seconds < 30.0


def test_save_on_all_but_rank_0_ends_once_rank_0_has(tmp_path, soon):
    def ranks(rank):
        meet(rank, 3, tmp_path)
        if rank > 0:
            mh.save(tmp_path / "run", value=1)

    ended = run_programs(3, ranks)
    assert [program.code for program in ended] == [0, 1, 1]
    for program in ended[1:]:
        assert "has called mh.save, and rank 0 has ended. Call it on every rank" in program.said


def test_save_weights_on_rank_0_alone_ends_once_the_other_processes_have(tmp_path, soon):
    def ranks(rank):
        mh.start()
        if rank == 0:
            mh.save_weights(nn.Linear(2, 2), tmp_path)

    ended = run_programs(3, ranks)
    assert [program.code for program in ended] == [1, 0, 0]
    assert "rank 0 has called mh.save_weights(), and ranks 1, 2 have ended." in ended[0].said


def test_all_ranks_that_have_called_are_told_by_the_first(tmp_path, soon):
    def ranks(rank):
        mh.start()
        if rank != 1:
            time.sleep(0.1 * rank)
            mh.save_weights(nn.Linear(2, 2), tmp_path)

    ended = run_programs(4, ranks)
    assert [program.code for program in ended] == [1, 0, 1, 1]
    # Rank 2 may have noticed, and ended, before rank 0 looks.
    assert re.search(r"rank 0 has called mh.save_weights\(\), and ranks? 1", ended[0].said)


def test_load_on_rank_0_alone_says_that_the_other_has_ended(tmp_path):
    mh.save(tmp_path, value=1)

    def ranks(rank):
        mh.start()
        if rank == 0:
            mh.load(tmp_path)

    first, _ = run_programs(2, ranks)
    assert first.code == 1
    assert "rank 0 has called mh.load, and rank 1 has ended. Call it on every rank." in first.said


def test_a_rank_that_dies_in_load_is_named_on_all_others(tmp_path):
    torch.manual_seed(0)
    mh.save(tmp_path / "run", model=nn.Linear(40, 40))

    def ranks(rank):
        meet(rank, 4, tmp_path)
        if rank == 1:
            _reader.Reader.read = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        mh.load(tmp_path / "run", model=nn.Linear(40, 40))

    ended = run_programs(4, ranks)
    assert [program.code for program in ended] == [1, -signal.SIGKILL, 1, 1]
    for rank in (0, 2, 3):
        assert "RuntimeError: rank 1 has ended while it loaded a checkpoint." in ended[rank].said


def test_a_rank_that_dies_in_save_is_named_at_once(tmp_path, soon):
    def ranks(rank):
        mh.start()
        if rank == 1:
            _writing.Save._write_file = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        mh.save(tmp_path, value=torch.ones(3))

    # By its heartbeats only, it would take a minute.
    first, _ = run_programs(2, ranks)
    assert first.code == 1
    assert first.seconds < 10.0
    assert "rank 1 has ended" in first.said


# -- ranks that train for different numbers of steps -----------------------------------------------


@pytest.mark.parametrize("kind", ["AdaScale", 1, 2, 3])
def test_unequal_numbers_of_batches_are_reported_with_ranks_and_steps(kind, tmp_path):
    def ranks(rank):
        meet(rank, 3, tmp_path)
        train(rank, 3 + rank, kind)

    ended = run_programs(3, ranks)
    assert [program.code for program in ended] == [0, 1, 1]
    for rank in (1, 2):
        said = f"RuntimeError: rank 0 has ended after 3 steps, and rank {rank} is in step 4. Every"
        assert said in ended[rank].said
        assert "give them equally many batches, or stop together" in ended[rank].said


def test_a_sync_round_that_a_rank_does_not_reach_names_it():
    def ranks(rank):
        mh.start()
        model = nn.Linear(4, 4)
        optimizer = mh.DiLoCo(SGD(model.parameters(), lr=0.01), every=2)
        for _ in range(3 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((1, 4), 1.0 + rank)).square().sum().backward()
            optimizer.step()

    first, other = run_programs(2, ranks)
    assert (first.code, other.code) == (0, 1)
    assert "RuntimeError: rank 0 has ended before a sync round. Every rank has to" in other.said


def test_the_error_of_a_rank_that_has_failed_is_shown_by_those_that_lose_it(tmp_path):
    def ranks(rank):
        meet(rank, 3, tmp_path)
        kept = train(rank, 2, "AdaScale")
        if rank == 1:
            raise ValueError("a bad sample")
        train(rank, 1, "AdaScale")
        del kept

    ended = run_programs(3, ranks)
    assert [program.code for program in ended] == [1, 1, 1]
    for rank in (0, 2):
        assert "RuntimeError: rank 1 has failed: ValueError: a bad sample" in ended[rank].said


@on_ranks(2)
def test_other_errors_are_left_as_they_are():
    before = RuntimeError("no connection of ours")
    with pytest.raises(RuntimeError) as raised, presence.explained():
        raise before
    assert raised.value is before
    assert presence.Presence(dist.distributed_c10d._get_default_store()).find_ended([0, 1]) == []


# -- ranks that wait elsewhere ---------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save", "save_weights"])
def test_a_save_in_a_loop_on_rank_0_alone_ends_all_ranks(call, tmp_path, soon):
    def ranks(rank):
        meet(rank, 3, tmp_path)
        model = DistributedDataParallel(nn.Linear(4, 4))
        optimizer = SGD(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            optimizer.step()
            if step == 1 and rank == 0 and call == "save":
                mh.save(tmp_path / "run", model=model)
            elif step == 1 and rank == 0:
                mh.save_weights(model, tmp_path / "weights")

    ended = run_programs(3, ranks)
    assert [program.code for program in ended] == [1, 1, 1]
    waits = "and ranks 1, 2 wait in loss.backward() (test_presence.py, line"
    assert f"rank 0 has called mh.{call}" in ended[0].said
    assert waits in ended[0].said
    for rank in (1, 2):  # which lose their connection to rank 0
        assert (
            "RuntimeError: rank 0 has failed: RuntimeError: rank 0 has called" in ended[rank].said
        )


def test_ranks_with_fewer_batches_that_save_at_the_end_do_not_wait_for_the_others(tmp_path, soon):
    def ranks(rank):
        mh.start()
        model, optimizer = train(rank, 3 + rank, "AdaScale")
        mh.save(tmp_path, model=model, optimizer=optimizer)

    first, other = run_programs(2, ranks)
    assert (first.code, other.code) == (1, 1)
    assert "rank 0 has called mh.save, and rank 1 waits in model(" in first.said


@pytest.mark.parametrize("busy", ["computes", "sleeps", "waits for data"])
def test_a_rank_that_is_late_is_waited_for(busy, tmp_path, soon):
    def ranks(rank):
        mh.start()
        until = time.monotonic() + 4.0
        if rank == 1 and busy == "computes":
            matrix = torch.randn(200, 200)
            while time.monotonic() < until:
                matrix @ matrix
        elif rank == 1 and busy == "sleeps":
            time.sleep(4.0)
        elif rank == 1:
            loader = torch.utils.data.DataLoader(Slow(), num_workers=1)
            assert len(list(loader)) == 4
        mh.save(tmp_path, value=1)

    ended = run_programs(2, ranks)
    assert [program.code for program in ended] == [0, 0], ended
    assert mh.load(tmp_path) == {"value": 1}


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        time.sleep(1.0)
        return i


# -- a thread that stands still --------------------------------------------------------------------


def test_a_thread_that_computes_does_not_stand_still_and_one_that_waits_does():
    standstill = Standstill()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    assert standstill.look() == 0.0
    time.sleep(0.3)
    assert 0.25 < standstill.look() < 0.5


def test_the_place_of_a_thread_is_the_line_of_the_script_in_which_it_waits_for_ranks():
    def ranks():
        places = []
        standstill = Standstill()

        def look():
            time.sleep(0.3)
            places.append(standstill.place())

        for wait in (lambda: dist.barrier(), lambda: time.sleep(0.5)):
            thread = threading.Thread(target=look)
            thread.start()
            if dist.get_rank() == 1:
                time.sleep(0.6)
            wait()
            thread.join()
        return places

    places, _ = run_ranks(2, ranks)
    assert places[0].startswith("for wait in (lambda: dist.barrier()")
    assert places[1] == ""
