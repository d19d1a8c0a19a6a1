"""Training that survives stopped ranks, cut networks, a lost store, and deaths at rare moments.

After each run, each step equals the step of a single process, and each sample is used once.
"""

import signal
from itertools import pairwise

import pytest

from helpers.crew_workers import Store
from helpers.surviving import NEEDS_TORCH, STALL, SurvivingRanks
from helpers.surviving_script import BATCH, SAMPLES, Fault, Options

pytestmark = [NEEDS_TORCH, pytest.mark.long]
STEPS = SAMPLES // BATCH  # per epoch
LONGER = STALL + 4.0
SHORTER = 0.7
MOMENTS = ["batch", "backward", "step", "stepped"]


def run_all(folder, ranks, *faults, **options):
    """Run to the end, with restarts after faults. Return the run."""
    with SurvivingRanks(folder, ranks, Options(faults=list(faults), **options)) as run:
        run.start()
        run.finish(timeout=90)
        assert len(run.events("fault")) == len(faults)
        run.check()
    return run


# -- stopped ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", MOMENTS)
@pytest.mark.parametrize("seconds", [SHORTER, LONGER], ids=["shorter", "longer"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_rank_is_stopped(tmp_path, worker, seconds, place):
    run = run_all(tmp_path, 3, Fault(worker, place, 5, "STOP", seconds), epochs=4, pause=0.4)
    sizes = {event["ranks"] for event in run.events("commit")}
    assert sizes == ({3} if seconds == SHORTER else {2, 3})


def test_a_rank_is_stopped_at_any_time(tmp_path):
    with SurvivingRanks(tmp_path, 3, Options(epochs=0, pause=0.02)) as run:
        run.start()
        run.wait_for_commits(3, ranks=3)
        for worker, seconds in [(0, SHORTER), (1, LONGER), (2, 0.2), (0, LONGER)]:
            run.stop(worker, seconds)
            run.wait_for_commits(3, ranks=3)
        run.finish()
        run.check()


@pytest.mark.parametrize("place", ["exchange", "transfer"])
@pytest.mark.parametrize("seconds", [SHORTER, LONGER], ids=["shorter", "longer"])
def test_a_rank_is_stopped_in_a_meeting(tmp_path, place, seconds):
    faults = [Fault(2, "backward", 5), Fault(1, place, 4, "STOP", seconds)]
    run_all(tmp_path, 3, *faults, epochs=4, pause=0.3)


# -- deaths at rare moments ----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["exchange", "transfer"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_rank_dies_in_the_meeting_after_a_death(tmp_path, worker, place):
    run_all(tmp_path, 4, Fault(2, "backward", 5), Fault(worker, place, 4), epochs=4, pause=0.1)


@pytest.mark.parametrize("worker", [0, 1, 3])
def test_a_rank_dies_while_the_group_connects(tmp_path, worker):
    """gloo has no abort of the wait for a connection that never comes."""
    run = run_all(tmp_path, 4, Fault(2, "backward", 5), Fault(worker, "connect", 4), epochs=4)
    times = [event["time"] for event in run.events("commit")]
    assert max(b - a for a, b in pairwise(times)) < 10.0


def test_a_rank_dies_in_the_meeting_after_others_have_stepped(tmp_path):
    # Worker 2 dies after its step, so some ranks may have stepped, and some not.
    run_all(tmp_path, 4, Fault(2, "stepped", 5), Fault(0, "exchange", 4), epochs=4, pause=0.1)


@pytest.mark.parametrize("place", ["exchange", "transfer", "unpack"])
def test_a_rank_dies_while_it_joins(tmp_path, place):
    faults = [Fault(1, "backward", 3), Fault(1, place, 0, life=2)]
    run_all(tmp_path, 3, *faults, epochs=6, pause=0.1)


def test_the_sender_of_the_state_dies(tmp_path):
    faults = [Fault(2, "backward", 3), Fault(0, "pack", 2)]
    run_all(tmp_path, 3, *faults, epochs=6, pause=0.1)


def test_a_rank_dies_in_the_first_meeting(tmp_path):
    run_all(tmp_path, 3, Fault(1, "exchange"))


@pytest.mark.parametrize("worker", [0, 1])
def test_a_rank_dies_in_an_evaluation_between_epochs(tmp_path, worker):
    run_all(tmp_path, 3, Fault(worker, "evaluation"), evaluates=True)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_rank_dies_in_the_evaluation_after_the_last_epoch(tmp_path, worker):
    run_all(tmp_path, 3, Fault(worker, "evaluation", 3 * STEPS - 1), evaluates=True)


def test_the_rank_that_saves_dies_in_the_save(tmp_path):
    run = run_all(tmp_path, 3, Fault(0, "save", 3), save_every=2, epochs=4, pause=0.1)
    with SurvivingRanks(tmp_path, 2, Options(epochs=6)) as more:
        more.start()
        more.finish()
        more.check()
    assert len(run.events("done")) == 5


def test_an_error_of_the_script_ends_a_rank(tmp_path):
    run_all(tmp_path, 3, Fault(1, "step", 5, "error"), epochs=4, pause=0.1)


def test_all_ranks_but_one_die_at_once(tmp_path):
    run_all(tmp_path, 4, *[Fault(worker, "backward", 5) for worker in (0, 1, 3)], epochs=4)


def test_all_ranks_die_and_continue_from_the_checkpoint(tmp_path):
    faults = [Fault(worker, "backward", 5) for worker in range(3)]
    with SurvivingRanks(tmp_path, 3, Options(faults=faults, save_every=1)) as run:
        run.start()
        run.finish(timeout=90)
        run.check()
        assert all(event["at"] > [0, 0] for event in run.events("joined")[3:])


def test_a_rank_dies_before_each_of_the_first_joins(tmp_path):
    """Ranks come one by one, and each dies soon."""
    faults = [Fault(worker, "batch", 0) for worker in range(3)]
    run_all(tmp_path, 3, *faults)


@pytest.mark.parametrize("options", [{"loaders": 2}, {"most": 3}, {"scaler": True}, {"ema": True}])
def test_many_kills(tmp_path, options):
    with SurvivingRanks(tmp_path, 4, Options(epochs=0, pause=0.01, **options)) as run:
        run.start()
        for number in range(20):
            run.wait_for_commits(2)
            run.until(lambda: len(run.joined()) >= 2)
            run.kill(run.joined()[number % len(run.joined())])
            run.sleep(0.1 * (number % 4))
        run.finish(timeout=90)
        run.check()


# -- networks and the store ----------------------------------------------------------------------


CUTS = {
    "unplugged": (lambda n: n.unplug("far"), lambda n: n.plug_in("far")),
    "all dropped": (lambda n: n.drop("far"), lambda n: n.mend("far")),
}


@pytest.mark.parametrize(("cut", "mend"), CUTS.values(), ids=CUTS)
def test_the_side_with_the_quorum_continues_and_the_other_side_joins_again(
    networks, tmp_path, cut, mend
):
    with (
        Store(networks.address("store")) as store,
        SurvivingRanks(
            tmp_path, 5, Options(epochs=0, pause=0.02), store=store, networks=networks, quorum=3
        ) as run,
    ):
        run.start(0, 1, 2, host="near")
        run.start(3, 4, host="far")
        run.wait_for_commits(4, ranks=5)
        for _ in range(2):
            cut(networks)
            run.wait_for_commits(5, ranks=3)
            mend(networks)
            run.wait_for_commits(4, ranks=5, timeout=90)
        run.finish(timeout=90)
        run.check()
        assert all(run.lives(worker) == 1 for worker in range(5))


@pytest.mark.parametrize("host", ["near", "far"])
def test_a_cut_between_the_sides_only(networks, tmp_path, host):
    """Both sides reach the store. Ranks cannot connect until the network is mended."""
    with (
        Store(networks.address("store")) as store,
        SurvivingRanks(
            tmp_path, 3, Options(epochs=0, pause=0.02), store=store, networks=networks
        ) as run,
    ):
        run.start(0, host=host)
        run.start(1, 2, host="far" if host == "near" else "near")
        run.wait_for_commits(4, ranks=3)
        networks.drop("near", "far")
        run.sleep(LONGER)
        networks.mend("near", "far")
        run.wait_for_commits(4, ranks=3, timeout=90)
        run.finish(timeout=90)
        run.check()


def test_the_store_is_silent_for_a_while(networks, tmp_path):
    with (
        Store(networks.address("store")) as store,
        SurvivingRanks(
            tmp_path, 3, Options(epochs=0, pause=0.02), store=store, networks=networks, quorum=2
        ) as run,
    ):
        run.start(0, 1, host="near")
        run.start(2, host="far")
        run.wait_for_commits(4, ranks=3)
        networks.drop("store")
        run.sleep(LONGER)
        networks.mend("store")
        run.wait_for_commits(4, ranks=3, timeout=90)
        run.finish(timeout=90)
        run.check()


def test_after_the_store_is_lost_ranks_train_on_and_a_death_raises(tmp_path):
    with (
        Store() as store,
        SurvivingRanks(
            tmp_path, 3, Options(epochs=0, pause=0.02), store=store, restarts=False
        ) as run,
    ):
        run.start()
        run.wait_for_commits(3, ranks=3)
        store.kill()
        run.wait_for_commits(30, ranks=3)
        run.kill(1)
        run.until_ended(timeout=60)
        assert run.code(1) == -signal.SIGKILL
        for worker in (0, 2):
            assert run.code(worker) == 1
            assert "StoreLost" in run.said(worker)


def test_after_the_store_is_lost_ranks_finish(tmp_path):
    with (
        Store() as store,
        SurvivingRanks(tmp_path, 3, Options(epochs=0, pause=0.02), store=store) as run,
    ):
        run.start()
        run.wait_for_commits(3, ranks=3)
        store.kill()
        run.wait_for_commits(10, ranks=3)
        run.finish(timeout=60)
        run.check()
