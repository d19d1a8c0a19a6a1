"""Training that survives lost ranks: each step equals the step of a single process.

`test_survive_faults.py` has the rarer faults, and `test_survive_mistakes.py` the errors.
"""

import signal

import pytest

from helpers.data_oracle import global_batches
from helpers.run_command import Command
from helpers.surviving import NEEDS_TORCH, SCRIPT, TOLERANCE, SurvivingRanks, compare
from helpers.surviving_script import BATCH, SAMPLES, Fault, Options

pytestmark = NEEDS_TORCH
STEPS = SAMPLES // BATCH  # per epoch
INFINITE = [global_batches(SAMPLES, BATCH)[2][5]]  # a sample of the third step


def killed(worker=1, place="backward", step=5, **options):
    """Options of a run in which a worker is killed in this step."""
    return Options(faults=[Fault(worker, place, step)], **options)


def run_all(folder, ranks, options, **checks):
    """Run to the end, with restarts after faults. Return the commits and the run."""
    with SurvivingRanks(folder, ranks, options) as run:
        run.start()
        run.finish()
        assert len(run.events("fault")) == len(options.faults)
        return run.check(**checks), run


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_without_faults_each_step_equals_the_step_of_a_single_process(tmp_path, ranks):
    _, run = run_all(tmp_path, ranks, Options())
    assert run.events("failed") == []


def test_without_an_engine_the_script_trains_alone(tmp_path):
    with SurvivingRanks(tmp_path, 1, Options(), engine=False) as run:
        run.start()
        run.finish()
        run.check()


@pytest.mark.parametrize("place", ["batch", "backward", "step", "stepped"])
@pytest.mark.parametrize("worker", [0, 2])
def test_after_a_kill_the_remaining_ranks_repeat_the_step(tmp_path, worker, place):
    commits, run = run_all(tmp_path, 3, killed(worker, place))
    ranks = [commits[key]["ranks"] for key in sorted(commits)]
    assert ranks[0] == 3 and 2 in ranks
    failed = {event["worker"] for event in run.events("failed")}
    assert worker not in failed


@pytest.mark.parametrize("place", ["batch", "step", "stepped"])
def test_a_rank_dies_in_the_first_step(tmp_path, place):
    run_all(tmp_path, 3, killed(0, place, step=0))


@pytest.mark.parametrize("place", ["batch", "step", "stepped"])
def test_a_rank_dies_in_the_last_step(tmp_path, place):
    run_all(tmp_path, 3, killed(0, place, step=3 * STEPS - 1))


def test_a_restarted_rank_receives_the_state_and_trains(tmp_path):
    with SurvivingRanks(tmp_path, 3, Options(epochs=0, pause=0.03)) as run:
        run.start()
        run.wait_for_commits(3, ranks=3)
        run.kill(1)
        run.wait_for_commits(1, ranks=2)
        run.wait_for_commits(3, ranks=3)
        run.finish()
        run.check()
        first, second = run.events("joined", 1)
        assert first["at"] == [0, 0]
        assert second["at"] > [0, 0]


def test_a_late_process_joins(tmp_path):
    with SurvivingRanks(tmp_path, 2, Options(epochs=0, pause=0.03)) as run:
        run.start(0, 1)
        run.wait_for_commits(3, ranks=2)
        run.start(2)
        run.wait_for_commits(3, ranks=3)
        run.finish()
        run.check()


def test_two_ranks_are_killed_at_once(tmp_path):
    faults = [Fault(1, "backward", 5), Fault(2, "backward", 5)]
    run_all(tmp_path, 4, Options(faults=faults))


@pytest.mark.parametrize("step", [2, 3])
def test_micro_batches_without_synchronization(tmp_path, step):
    _, run = run_all(tmp_path, 3, killed(step=step, most=3))
    passes = {(event["ranks"], event["passes"]) for event in run.events("try")}
    assert {(3, 3), (2, 6)} <= passes  # two of three parts on a rank
    assert max(len(event["samples"]) for event in run.events("try")) == 3


def test_samples_that_the_ranks_do_not_divide_evenly(tmp_path):
    _, run = run_all(tmp_path, 5, killed(4, most=2))
    assert {len(event["samples"]) for event in run.events("try")} == {0, 1, 2}


def test_level_0_of_shard(tmp_path):
    run_all(tmp_path, 3, killed(shard=True))


def test_clipped_gradients(tmp_path):
    run_all(tmp_path, 3, killed(clip=0.1))


def test_loader_processes(tmp_path):
    run_all(tmp_path, 2, killed(step=3, loaders=2))
    assert list(tmp_path.glob("loader-*"))


def test_an_average_of_parameters_follows_committed_steps_only(tmp_path):
    run_all(tmp_path, 3, killed(place="step", ema=True))


@pytest.mark.parametrize("step", [2, 3, 6])
def test_a_gradient_scaler_skips_an_infinite_step(tmp_path, step):
    options = killed(step=step, scaler=True, infinite=INFINITE)
    commits, _ = run_all(tmp_path, 3, options)
    assert len(commits) == 3 * STEPS - 1
    assert commits[2, 0]["loss_scale"] == 2 * 512.0


def test_a_gradient_scaler_with_clipping(tmp_path):
    run_all(tmp_path, 3, killed(scaler=True, clip=0.1))


def test_buffers_count_committed_steps_only(tmp_path):
    # Statistics of a batch depend on the number of ranks, so no oracle has these parameters.
    commits, _ = run_all(tmp_path, 3, killed(norm=True), parameters=False)
    counted = [commits[key]["tracked"] for key in sorted(commits)]
    assert counted == list(range(1, 3 * STEPS + 1))


def test_a_repeated_step_draws_the_same_random_numbers(tmp_path):
    commits, run = run_all(tmp_path, 3, killed(dropout=True), parameters=False)
    for worker in (0, 2):
        tries = [event for event in run.events("try", worker) if event["at"] == [1, BATCH]]
        assert len(tries) == 2
        assert tries[0]["generator"] == tries[1]["generator"]
    generators = {event["generator"] for event in run.events("try", 0)}
    assert len(generators) == len(commits)


@pytest.mark.parametrize("most", [None, 3])
def test_a_rule_counts_committed_steps_only(tmp_path, most):
    commits, _ = run_all(tmp_path, 3, killed(rule="AdaScale", most=most), parameters=False)
    progress = 0.0
    for key in sorted(commits):
        step = commits[key]
        assert 1.0 <= step["gain"] <= step["scale"]
        progress += step["gain"]
        assert step["progress"] == pytest.approx(progress, rel=1e-12)
    assert {step["scale"] for step in commits.values()} == {9.0 if most else 3.0}


@pytest.mark.parametrize("rule", ["AdaScale", "LinearScale"])
def test_a_rule_with_equal_micro_batches_has_the_gains_of_a_run_without_faults(tmp_path, rule):
    found = {}
    for name, options in {
        "plain": Options(rule=rule, most=3),
        "killed": killed(rule=rule, most=3),
    }.items():
        (tmp_path / name).mkdir()
        found[name], _ = run_all(tmp_path / name, 3, options, parameters=False)
    assert compare(found["plain"], found["killed"]) < TOLERANCE


def test_a_rank_that_receives_a_stop_notice_saves_and_leaves(tmp_path):
    with SurvivingRanks(tmp_path, 3, Options(epochs=0, pause=0.03, stops=True)) as run:
        run.start()
        run.wait_for_commits(3, ranks=3)
        run.send(signal.SIGTERM, 1)
        run.wait_for_commits(3, ranks=2)
        run.finish()
        run.check()
        assert [event["worker"] for event in run.events("leaves")] == [1]


def test_a_stopped_run_continues_from_the_checkpoint_with_other_ranks(tmp_path):
    with SurvivingRanks(tmp_path, 3, Options(epochs=2, save_every=2)) as run:
        run.start()
        run.finish()
    with SurvivingRanks(tmp_path, 2, Options(epochs=4)) as run:
        run.start()
        run.finish()
        commits = run.check()
        assert commits[1, 0]["ranks"] == 3
        assert commits[2, 0]["ranks"] == 2
        assert [event["at"] for event in run.events("joined")[-2:]] == [[1, SAMPLES]] * 2


@pytest.mark.long
@pytest.mark.parametrize("fork", ["--fork", "--no-fork"])
def test_manyhands_run_restarts_killed_ranks(tmp_path, fork):
    options = Options(epochs=0, pause=0.05, loaders=1)
    arguments = (options.text(),)
    words = ("--workers", "3", fork)
    with (
        SurvivingRanks(tmp_path, 3, options) as run,
        Command(tmp_path, SCRIPT, *words, arguments=arguments) as command,
    ):
        run.watch(command)
        run.wait_for_commits(3, ranks=3)
        run.kill(1)
        run.wait_for_commits(1, ranks=2)
        run.wait_for_commits(3, ranks=3)
        run.kill(0)
        run.wait_for_commits(1, ranks=2)
        run.wait_for_commits(3, ranks=3)
        run.stop_soon()
        assert command.wait(60) == 0
        run.no_process_left()
        run.check()
