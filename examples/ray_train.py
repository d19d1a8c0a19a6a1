"""Train with Ray Train on one to four workers, depending on the resources of the cluster.

    python examples/ray_train.py
    python examples/ray_train.py --workers 2 2 --cpus 2     # two workers on two cores

The training function contains no Ray-specific code: `mh.start` detects Ray, `job.save` writes to
Ray's storage and reports the checkpoint without a copy, and `mh.stopping` detects that Ray drains a
node. When the number of workers changes, Ray calls the function again, and training resumes from
the last checkpoint with the same batch per step.

Requires ray[train].
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh


def train(config):
    job = mh.start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(4096, 16)
    targets = torch.tanh(inputs @ torch.randn(16, 1)) + 0.1 * torch.randn(4096, 1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    passes = config["micro_batches"] // job.world_size
    optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=passes)

    step = job.load(model=model, optimizer=optimizer).get("step", 0)
    while step < config["steps"]:
        optimizer.zero_grad()
        for number in range(passes):
            first = 16 * (step * config["micro_batches"] + job.rank * passes + number)
            rows = torch.arange(first, first + 16) % len(inputs)
            (mse_loss(ddp(inputs[rows]), targets[rows]) / passes).backward()
        optimizer.step()
        step += 1
        stopping = mh.stopping(optimizer)
        if stopping or step % config["save_every"] == 0 or step == config["steps"]:
            loss = mse_loss(model(inputs), targets).item()
            job.save(model=model, optimizer=optimizer, step=step, loss=loss)
        if stopping:
            job.leave()  # waits until Ray restarts the function on other nodes


if __name__ == "__main__":
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs=2, default=[1, 4], help="minimum and maximum")
    parser.add_argument(
        "--cpus", type=int, help="CPUs of a new local cluster; default: a running cluster"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--storage", default="~/ray_results", help="a folder shared by all nodes")
    args = parser.parse_args()

    # With --cpus, start a local cluster. Otherwise, use this machine's cluster, if any.
    ray.init("local" if args.cpus else None, num_cpus=args.cpus)
    least, most = args.workers
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "steps": args.steps,
            "micro_batches": 4,
            "save_every": args.save_every,
        },
        scaling_config=ScalingConfig(num_workers=least if least == most else (least, most)),
        run_config=RunConfig(
            storage_path=str(Path(args.storage).expanduser().absolute()),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.4f} after {result.metrics['step']} steps")
    print(f"the last checkpoint: {result.checkpoint.path}")
    ray.shutdown()
