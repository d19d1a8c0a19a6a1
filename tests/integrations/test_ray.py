"""Ray Train: the example as it is, and a run on two nodes of which one is drained.

Each test has a Ray of its own, in a process of its own: a few hundred MB, and half a minute.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import manyhands as mh

pytest.importorskip("ray.train", reason='Ray Train is missing: pip install "ray[train]"')

ROOT = pathlib.Path(__file__).parents[2]

DRAINED = """
import json, sys, threading, time
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
    while step < config["steps"]:
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
second = cluster.add_node(num_cpus=1)
ray.init(cluster.address)


def drain():
    log = folder / "log.0"
    while not log.exists() or len(log.read_text().splitlines()) < 20:
        time.sleep(0.1)
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(
        second.node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "taken away",
        int((time.time() + 15) * 1000),
    )
    print("drained", accepted, why, flush=True)


threading.Thread(target=drain, daemon=True).start()
trainer = TorchTrainer(
    train,
    train_loop_config={"steps": 300, "log": str(folder / "log")},
    scaling_config=ScalingConfig(num_workers=(1, 2)),
    run_config=RunConfig(
        name="run",
        storage_path=str(folder / "storage"),
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    ),
)
result = trainer.fit()
print("RESULT", json.dumps([result.checkpoint.path, result.metrics]), flush=True)
ray.shutdown()
cluster.shutdown()
"""


def run(script, *arguments, **variables):
    """Run a driver of Ray to its end, and return what it has printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    return done.stdout


def test_the_example_saves_into_rays_storage_and_nowhere_else(tmp_path):
    options = ["--workers", 2, 2, "--cpus", 3, "--steps", 40, "--storage", tmp_path]
    said = run(ROOT / "examples" / "ray_train.py", *options)
    (path,) = re.findall(r"the last checkpoint: (\S+)", said)
    assert pathlib.Path(path).name == "000002-step-40"
    assert tmp_path in pathlib.Path(path).parents
    saved = {p.parent.name for p in tmp_path.rglob("worker-00001.safetensors")}
    assert saved == {"000001-step-20", "000002-step-40"}  # one of each: no second copy
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    assert mh.load(path, model=model)["step"] == 40


def test_a_node_that_is_drained_costs_no_step(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRAINED)
    said = run(script, tmp_path)
    assert "drained True" in said
    lines = [json.loads(line) for line in (tmp_path / "log.0").read_text().splitlines()]
    assert [step for step, *_ in lines] == list(range(1, 301))  # none lost, none taken twice
    sizes = [size for _, size, *_ in lines]
    assert sizes == sorted(sizes, reverse=True)
    assert {1, 2} == set(sizes)
    (path, metrics) = json.loads(re.findall(r"RESULT (.*)", said)[-1])
    assert (pathlib.Path(path).name.split("-")[-1], metrics["step"]) == ("300", 300)
    # Ray has deleted the one before, as CheckpointConfig(num_to_keep=1) says.
    assert len(list((tmp_path / "storage" / "run" / "run").glob("0*"))) == 1

    # The same training in one process.
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=4)
    for step in range(60):
        optimizer.zero_grad()
        for number in range(4):
            seed = 4 * step + number
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            error = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
            (error / 4).backward()
        optimizer.step()
        assert lines[step][2] == pytest.approx(optimizer.progress, rel=1e-4)
        torch.testing.assert_close(torch.tensor(lines[step][3]), model.weight.detach())
