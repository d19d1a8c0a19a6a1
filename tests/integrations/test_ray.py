"""Ray Train: the example as it is, and a node that is drained. Crews of Ray's tasks.

Each test starts a driver in a process of its own, with a Ray of its own (`helpers/rays.py`): a few
hundred MB, and half a minute.
"""

import itertools
import json
import pathlib
import re

import pytest
import torch
from torch import nn

import manyhands as mh
from helpers.pages import ROOT, blocks, write_file
from helpers.rays import run_driver

pytest.importorskip("ray.train", reason='Ray Train is missing: pip install "ray[train]"')

DRAIN = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

folder = Path(sys.argv[1])


def train(config):
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel
    import manyhands as mh

    job = mh.start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    ddp = DistributedDataParallel(model)
    passes = 4 // job.world_size
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=passes)
    step = job.load(model=model, optimizer=optimizer).get("step", 0)
    while not Path(config["end"]).exists():
        optimizer.zero_grad()
        for number in range(passes):
            seed = 4 * step + passes * job.rank + number
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            (mse_loss(ddp(x), x.sum(dim=1, keepdim=True)) / passes).backward()
        optimizer.step()
        step += 1
        with open(config["log"] + f".{job.rank}", "a") as file:
            line = [step, job.world_size, optimizer.progress, model.weight.tolist()]
            file.write(json.dumps(line) + "\\n")
        time.sleep(0.05)
        if mh.stopping(optimizer):
            job.save(model=model, optimizer=optimizer, step=step)
            job.leave()
    job.save(model=model, optimizer=optimizer, step=step)


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
ray.init(cluster.address)


def steps_of(workers):
    log = folder / "log.0"
    lines = log.read_text().splitlines() if log.exists() else []
    return sum(json.loads(line)[1] == workers for line in lines)


def wait_for_steps(workers, number=20):
    before = steps_of(workers)
    while steps_of(workers) < before + number:
        assert not training.done(), training.result()
        time.sleep(0.1)


three = cluster.add_node(num_cpus=3)


def drain():
    wait_for_steps(workers=4)
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(
        three.node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "taken away",
        int((time.time() + 60) * 1000),  # a busy machine takes long to save
    )
    assert accepted, why
    wait_for_steps(workers=1)


config = {"log": str(folder / "log"), "end": str(folder / "end")}
trainer = TorchTrainer(
    train,
    train_loop_config=config,
    scaling_config=ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=2),
    run_config=RunConfig(
        name="run",
        storage_path=str(folder / "storage"),
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    ),
)
with ThreadPoolExecutor(1) as other:
    training = other.submit(trainer.fit)
    try:
        drain()
    finally:
        (folder / "end").touch()
    result = training.result()
print("RESULT", json.dumps([result.checkpoint.path, result.metrics]), flush=True)
ray.shutdown()
cluster.shutdown()
"""


def test_the_example_saves_into_rays_storage_and_nowhere_else(tmp_path):
    here, storage = tmp_path / "here", tmp_path / "storage"
    here.mkdir()
    options = ["--workers", 2, 2, "--cpus", 3, "--steps", 40, "--storage", storage]
    said = run_driver(ROOT / "examples" / "ray_train.py", *options, folder=here)
    (path,) = re.findall(r"the last checkpoint: (\S+)", said)
    assert pathlib.Path(path).name == "000002-step-40"
    assert storage in pathlib.Path(path).parents
    saved = sorted(p.parent.name for p in tmp_path.rglob("worker-00001-*.safetensors"))
    assert saved == ["000001-step-20", "000002-step-40"]  # one of each: no second copy
    assert not list(here.iterdir())
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    assert mh.load(path, model=model)["step"] == 40


def test_a_drained_node_costs_no_step(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRAIN)
    said = run_driver(script, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.0").read_text().splitlines()]
    last = len(lines)
    assert [step for step, *_ in lines] == list(range(1, last + 1))  # none lost, none taken twice
    sizes = [size for _, size, *_ in lines]
    assert [size for size, _ in itertools.groupby(sizes)] == [4, 1]
    (path, metrics) = json.loads(re.findall(r"RESULT (.*)", said)[-1])
    assert (pathlib.Path(path).name.split("-")[-1], metrics["step"]) == (str(last), last)
    # Ray knows all checkpoints: it has deleted those before, as num_to_keep=1 says.
    assert len(list((tmp_path / "storage" / "run" / "run").glob("0*"))) == 1

    # The same training in one process.
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=4)
    for step in range(last):
        optimizer.zero_grad()
        for number in range(4):
            seed = 4 * step + number
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            error = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
            (error / 4).backward()
        optimizer.step()
        assert lines[step][2] == pytest.approx(optimizer.progress, rel=1e-4)
        torch.testing.assert_close(torch.tensor(lines[step][3]), model.weight.detach())


CREW = """
import json, os, sys, time
from pathlib import Path

import ray

from manyhands.integrations.ray import CrewStore

folder = Path(sys.argv[1])


def train():
    import torch
    import manyhands as mh

    job = mh.start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = mh.DiLoCo(sgd, every=5, crew=job.crew)
    began, lives = optimizer.steps, folder / f"lives.{job.worker}"
    first_life = job.worker == 1 and not lives.exists()
    with lives.open("a") as file:
        file.write(f"{os.getpid()} {began}\\n")
    if job.worker == 1 and not first_life:  # it is back: all take 100 steps more
        (folder / "some").write_text(str(began + 100))
        (folder / "some").rename(folder / "last")
    generator = torch.Generator().manual_seed(job.worker)
    last = folder / "last"
    while not last.exists() or optimizer.steps < int(last.read_text()):
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=generator)
        torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
        optimizer.step()
        if first_life and optimizer.steps == began + 12:
            os._exit(1)
        time.sleep(0.02)
    optimizer.finish()
    return job.engine, job.worker, job.workers, model.weight.tolist()


ray.init(num_cpus=3, include_dashboard=False)
store = CrewStore(workers=3)
task = ray.remote(max_retries=-1)(train)
results = ray.get([task.options(**store.options(number)).remote() for number in range(3)])
print("RESULT", json.dumps(results), flush=True)
ray.shutdown()
"""


def test_a_task_that_dies_comes_back_to_its_crew(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(CREW)
    said = run_driver(script, tmp_path)
    results = json.loads(re.findall(r"RESULT (.*)", said)[-1])
    assert [each[:3] for each in results] == [["manyhands", number, 3] for number in range(3)]
    assert results[0][3] == results[1][3] == results[2][3]
    lives = [(tmp_path / f"lives.{number}").read_text().splitlines() for number in range(3)]
    assert [len(each) for each in lives] == [1, 2, 1]  # the others never began again
    first, second = (int(line.split()[1]) for line in lives[1])
    assert second > first + 12  # and it received their state


def test_the_pages_crew_runs(tmp_path):
    (block,) = [b for b in blocks(ROOT / "docs" / "engines" / "ray.md") if b.title == "crew.py"]
    write_file(block, tmp_path)
    run_driver(tmp_path / "crew.py", folder=tmp_path)
