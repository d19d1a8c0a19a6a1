"""The ground the distributed tests stand on: a failing rank is seen, named and never waited for."""

import os
import signal
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.ranks import RanksFailed, on_ranks, raises_on_ranks, run_ranks


def test_results_come_in_rank_order():
    def late_first():
        time.sleep(0.02 * (dist.get_world_size() - dist.get_rank()))
        return dist.get_rank(), torch.full((2,), dist.get_rank()), {"loss": 0.5, "note": None}

    for rank, (got, tensor, rest) in enumerate(run_ranks(4, late_first)):
        assert got == rank
        assert tensor.tolist() == [rank, rank]
        assert rest == {"loss": 0.5, "note": None}


def test_backward_in_the_parent_does_not_keep_the_ranks_from_backward():
    def gradient():
        x = torch.ones(2, requires_grad=True)
        (x * x).sum().backward()
        return x.grad

    torch.testing.assert_close(run_ranks(2, gradient), [gradient()] * 2)


def test_ranks_draw_from_the_seed_of_the_test():
    here = torch.get_rng_state()
    assert run_ranks(2, lambda: torch.rand(1).item()) == [torch.rand(1).item()] * 2
    assert not torch.equal(here, torch.get_rng_state())


def test_a_rank_that_is_done_waits_for_the_others():
    def last_alone():
        if dist.get_rank() == 1:
            time.sleep(0.3)
            dist.send(torch.ones(1), 0)
        elif dist.get_rank() == 0:
            dist.recv(torch.ones(1), 1)

    assert run_ranks(3, last_alone) == [None] * 3


def test_a_failing_rank_shows_its_traceback_and_is_not_waited_for():
    def fails_on_one():
        if dist.get_rank() == 1:
            raise KeyError("the bug")
        dist.barrier()

    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="1 of 3 ranks failed") as caught:
        run_ranks(3, fails_on_one)
    assert time.monotonic() - begin < 10
    message = str(caught.value)
    assert "rank 1 raised:\nTraceback" in message
    assert "in fails_on_one" in message
    assert "KeyError: 'the bug'" in message
    assert "rank 0 was still waiting" in message
    assert message.index("rank 1 raised") < message.index("rank 0 was still")


def test_a_hang_says_which_rank_waits_where():
    def one_is_missing():
        if dist.get_rank() != 2:
            dist.all_reduce(torch.ones(1))

    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="2 of 3 ranks did not finish within 2 s") as caught:
        run_ranks(3, one_is_missing, timeout=2)
    assert time.monotonic() - begin < 10
    message = str(caught.value)
    for rank in (0, 1):
        assert f"rank {rank} was still waiting" in message
    assert message.count("in all_reduce") == 2
    assert message.count("in one_is_missing") == 2
    assert "in pytest_runtest_call" not in message
    assert "rank 2 returned" in message


def test_a_rank_that_dies_is_named_with_its_signal():
    def shoots_itself():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RanksFailed, match=r"rank 1 died without a traceback \(SIGKILL\)"):
        run_ranks(2, shoots_itself)


def test_a_rank_that_aborts_shows_its_stack_in_the_message_only(capfd):
    def aborts():
        if dist.get_rank() == 1:
            os.abort()

    with pytest.raises(
        RanksFailed, match=r"rank 1 died \(SIGABRT\):\nFatal Python error"
    ) as caught:
        run_ranks(2, aborts)
    assert "in aborts" in str(caught.value)
    assert "in pytest_runtest_call" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_forked_process_reports_its_crash_where_pytest_captures_it(capfd):
    process = os.fork()
    if process == 0:
        os.abort()
    os.waitpid(process, 0)
    assert "Fatal Python error: Aborted" in capfd.readouterr().err


def test_no_process_is_left_behind(tmp_path):
    def note_pid(hang):
        (tmp_path / str(os.getpid())).touch()
        if hang:
            dist.recv(torch.ones(1), 1 - dist.get_rank())

    run_ranks(2, note_pid, hang=False)
    with pytest.raises(RanksFailed):
        run_ranks(2, note_pid, hang=True, timeout=3.0)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_warning_in_a_rank_is_an_error():
    def warns():
        warnings.warn("careful", stacklevel=2)

    with pytest.raises(RanksFailed, match="UserWarning: careful"):
        run_ranks(2, warns)


def test_what_a_rank_prints_is_shown(capfd):
    def prints():
        # Each in one write: two ranks print into the same file at the same time.
        sys.stdout.write(f"hello from {dist.get_rank()}\n")
        sys.stderr.write(f"trouble on {dist.get_rank()}\n")

    run_ranks(2, prints)
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["hello from 0", "hello from 1"]
    assert "trouble on 1" in shown.err


def test_a_result_that_does_not_travel_says_so():
    with pytest.raises(TypeError, match="Return tensors, numbers, strings"):
        run_ranks(1, lambda: signal.SIGKILL)


def test_raises_on_ranks_returns_the_messages():
    def fails():
        raise ValueError(f"scale on rank {dist.get_rank()} must be positive")

    messages = raises_on_ranks(2, ValueError, fails, match="must be positive")
    assert messages == [f"scale on rank {rank} must be positive" for rank in (0, 1)]


def test_raises_on_ranks_fails_if_one_rank_does_not_raise():
    def fails_on_zero():
        if dist.get_rank() == 0:
            raise ValueError("no")

    with pytest.raises(RanksFailed, match=r"1 of 2 ranks did not raise ValueError") as caught:
        raises_on_ranks(2, ValueError, fails_on_zero)
    assert "rank 1: returned None" in str(caught.value)


def test_raises_on_ranks_fails_on_another_message_or_type():
    def fails():
        raise ValueError("one" if dist.get_rank() == 0 else "two")

    with pytest.raises(RanksFailed, match="did not raise ValueError matching 'one'"):
        raises_on_ranks(2, ValueError, fails, match="one")
    with pytest.raises(RanksFailed, match="2 of 2 ranks did not raise TypeError"):
        raises_on_ranks(2, TypeError, fails)


def test_raises_on_ranks_fails_if_one_rank_hangs():
    def fails_on_zero():
        if dist.get_rank() == 0:
            raise RuntimeError("no")
        dist.barrier()

    with pytest.raises(RanksFailed, match="1 of 2 ranks did not finish within 1 s"):
        raises_on_ranks(2, RuntimeError, fails_on_zero, timeout=1)


def test_a_decorated_test_runs_and_fails_on_its_ranks():
    @on_ranks("size")
    def fails_on_the_last(size):
        assert dist.get_world_size() == size
        assert dist.get_rank() < 2, "the last"

    @on_ranks(2, raises=ValueError, match="one")
    def raises(text):
        raise ValueError(text)

    fails_on_the_last(size=2)
    with pytest.raises(RanksFailed, match=r"(?s)1 of 3 ranks failed.*the last"):
        fails_on_the_last(size=3)
    raises(text="one")
    with pytest.raises(RanksFailed, match="2 of 2 ranks did not raise ValueError matching 'one'"):
        raises(text="two")


@given(st.floats(0, 1))
def test_properties_run_beside_the_seeding_fixture(x):
    assert 0 <= x <= 1
