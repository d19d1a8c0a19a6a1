"""One script, no engine's line in it: the same losses under each engine, bit for bit."""

import json
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.crew_workers import SECRET, Store, fork
from helpers.pages import ROOT, free_port, in_told_forks
from helpers.ranks import run_ranks
from manyhands._ranks.stop_notice import stop_notice
from manyhands.engines._stopping import listener

SCRIPT = str(ROOT / "examples" / "engines" / "train.py")
KNOWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch):
    for name in KNOWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def kubeflow(rank, size, port):
    """What Kubeflow's PyTorchJob tells a pod."""
    return {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def torchrun(rank, size, port):
    more = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {**kubeflow(rank, size, port), **more}


def srun(rank, size, port):
    return {
        "SLURM_JOB_ID": port,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_TASKS_PER_NODE": size,
        "SLURM_STEP_NODELIST": "localhost",
    }


def submitit(rank, size, port):
    return {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": port,
        "SUBMITIT_LOCAL_NTASKS": size,
        "SUBMITIT_LOCAL_GLOBALID": rank,
        "SUBMITIT_LOCAL_LOCALID": rank,
    }


def train_job(rank, size, port):
    """What Kubeflow Trainer tells a pod, with `python` as its command."""
    return {
        "PET_NNODES": size,
        "PET_NPROC_PER_NODE": 1,
        "PET_NODE_RANK": rank,
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }


def mpirun(rank, size, port):
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": size,
        "PMIX_NAMESPACE": port,
    }


def losses_under(engine, folder, *options, size=2):
    port = free_port()
    told = [
        {name: str(value) for name, value in engine(rank, size, port).items()}
        for rank in range(size)
    ]
    name = f"{engine.__name__}{size}"
    paths = ["--losses", str(folder / name), "--checkpoints", str(folder / f"{name}-run")]
    code, said = in_told_forks(told, SCRIPT, "--steps", "12", *paths, *options)
    assert code == 0, said
    return [(folder / f"{name}.{rank}").read_text() for rank in range(size)], said


SAID = {torchrun: "torchrun", srun: "slurm", submitit: "submitit"}  # by the run, of itself
ENGINES = (*SAID, mpirun, train_job)


@pytest.mark.parametrize(
    ("options", "engines"),
    [
        pytest.param([], ENGINES, id="AdaScale"),
        pytest.param(["--blocks"], (torchrun, mpirun), id="blocks"),
        pytest.param(["--blocks"], ENGINES, id="blocks, every engine", marks=pytest.mark.long),
    ],
)
def test_the_engines_variables_give_the_same_losses(options, engines, tmp_path):
    expected, said = losses_under(kubeflow, tmp_path, *options)
    assert "rank 1 of 2 (variables) begins with step 0" in said
    for engine in engines:
        found, said = losses_under(engine, tmp_path, *options)
        assert found == expected
        if engine in SAID:
            assert f"rank 1 of 2 ({SAID[engine]}) begins with step 0" in said


def test_one_rank_takes_the_same_steps_as_two(tmp_path):
    (first, second), _ = losses_under(kubeflow, tmp_path)
    (alone,), _ = losses_under(kubeflow, tmp_path, size=1)
    alone, first, second = (
        [float.fromhex(json.loads(line)[1]) for line in text.splitlines()]
        for text in (alone, first, second)
    )
    means = [(one + two) / 2 for one, two in zip(first, second, strict=True)]
    assert alone == pytest.approx(means, rel=1e-4)


def crew_workers(script_options, folder, variables, number=2):
    """The example as the workers of a crew, each a fork; their losses and what they printed."""
    told = [{**variables, "MANYHANDS_WORKER": str(worker)} for worker in range(number)]
    code, said = in_told_forks(told, SCRIPT, "--blocks", "--steps", "12", *script_options)
    assert code == 0, said
    return said


def test_a_crew_has_the_losses_of_fixed_ranks(tmp_path):
    expected, _ = losses_under(kubeflow, tmp_path, "--blocks")
    with Store() as store:
        variables = {
            "MANYHANDS_STORE": store.address,
            "MANYHANDS_SECRET": SECRET,
            "MANYHANDS_WORKERS": "2",
            "MANYHANDS_RUN": "x",
        }
        options = ["--losses", str(tmp_path / "crew"), "--checkpoints", str(tmp_path / "crew-run")]
        said = crew_workers(options, tmp_path, variables)
    assert "rank 0 of 1 (manyhands) begins with step 0" in said
    for worker, lines in enumerate(expected):
        found = (tmp_path / f"crew.{worker}").read_text().splitlines()
        for (step, loss), (expected_step, expected_loss) in zip(
            map(json.loads, found), map(json.loads, lines.splitlines()), strict=True
        ):
            assert step == expected_step
            # The last bit of a product may depend on where its operands lie in memory.
            assert float.fromhex(loss) == pytest.approx(float.fromhex(expected_loss), rel=1e-6)


# -- a crew's worker that is asked to stop ---------------------------------------------------------


def crew_worker(store, number, folder, *, every, pause, signalled, steps=40):
    """A worker of three; the one with the number `signalled` gets SIGTERM in its step 13."""

    def train():
        listener.start()
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        crew = mh.Crew(store.address, number=number, expected=3, secret=SECRET)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = mh.DiLoCo(sgd, every=every, crew=crew)
        generator = torch.Generator().manual_seed(number)
        while optimizer.steps < steps:
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            if optimizer.steps == 12 and number in signalled:
                os.kill(os.getpid(), signal.SIGTERM)
                stop_notice.grace = pause[1]
            time.sleep(pause[0])
            optimizer.step()
            if mh.stopping(optimizer):
                break
        job = mh.start(checkpoints=folder / "run", process_group=False)
        job.__dict__["crew"] = crew  # as the environment would give it
        saved = job.save(model=model, optimizer=optimizer) if number in signalled else None
        optimizer.finish()
        facts = [optimizer.steps, optimizer.snapshot()["undone"], model.weight.tolist()]
        (folder / f"{number}.json").write_text(json.dumps([*facts, str(saved)]))
        sys.stdout.flush()

    return fork(train, folder / f"{number}.errors")


def crew_of_three(tmp_path, **options):
    with Store() as store:
        pids = [crew_worker(store, number, tmp_path, **options) for number in range(3)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    errors = [path.read_text() for path in tmp_path.glob("*.errors")]
    assert codes == [0, 0, 0], errors
    return [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3)]


def test_a_worker_with_time_ends_its_block_and_nobody_loses_a_step(tmp_path):
    results = crew_of_three(tmp_path, every=10, pause=(0.005, 30.0), signalled=[1])
    assert [steps for steps, *_ in results] == [40, 20, 40]
    # The others repeat the round in which they find it gone, with all of their steps.
    assert all(undone <= 1 for _, undone, *_ in results)
    assert results[0][2] == results[2][2]


def test_a_worker_without_time_leaves_at_once_and_the_others_go_on(tmp_path):
    results = crew_of_three(tmp_path, every=10, pause=(0.05, 0.4), signalled=[1])
    assert [steps for steps, *_ in results] == [40, 13, 40]
    assert results[0][2] == results[2][2]


def test_when_all_workers_are_stopped_one_of_them_has_saved(tmp_path):
    results = crew_of_three(tmp_path, every=10, pause=(0.005, 30.0), signalled=[0, 1, 2])
    assert [steps for steps, *_ in results] == [20, 20, 20]
    assert [undone for _, undone, *_ in results] == [0, 0, 0]
    saved = [path for *_, path in results if path != "None"]
    assert len(saved) == 1

    def load():
        model = nn.Linear(4, 1)
        mh.load(tmp_path / "run", model=model)
        return model.weight.tolist()

    assert run_ranks(1, load) == [results[0][2]]
    assert not dist.is_initialized()
