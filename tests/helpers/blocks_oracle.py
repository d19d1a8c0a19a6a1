"""Block-wise training written out, all workers in one process: what the distributed one must equal.

Its outer steps are formulas on lists of tensors, with nothing of the library in them.
"""

import torch
from torch.optim import SGD, Adam

from helpers.ranks import run_ranks
from helpers.recorded import recorded_values

INNER = {
    "sgdm": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adam_torch": lambda params: Adam(params, lr=0.02, betas=(0.9, 0.98), eps=1e-8),
}


def loss_of(params, x, y):
    """Return the loss of the reference's problem: a tanh network of two layers."""
    w1, b1, w2, b2 = params
    return ((torch.tanh(x @ w1.T + b1) @ w2.T + b2 - y) ** 2).mean()


def problem(table):
    """Return each rank's initial parameters, and each step's batch of each rank."""
    init = [torch.tensor(value, dtype=torch.float64) for value in table["inputs"]["init"]]
    x, y = (torch.tensor(table["inputs"][name], dtype=torch.float64) for name in "xy")
    return [init, init], list(zip(zip(*x, strict=True), zip(*y, strict=True), strict=True))


class Worker:
    """One worker's parameters and inner optimizer."""

    def __init__(self, init, kind):
        self.params = [p.clone().requires_grad_() for p in init]
        self.kind = kind
        self.optimizer = INNER[kind](self.params)

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss_of(self.params, x, y).backward()
        self.optimizer.step()

    def set(self, values):
        with torch.no_grad():
            for param, value in zip(self.params, values, strict=True):
                param.copy_(value)

    def reset_state(self):
        self.optimizer = INNER[self.kind](self.params)


def assert_fairseqs_values(wrap):
    """Check that `wrap(optimizer, **options)` repeats fairseq's recorded runs on two ranks."""
    table = recorded_values("bmuf_fairseq_world2")
    init, data = problem(table)

    def all_cases():
        results = []
        for case in table["cases"]:
            options = dict(case["cfg"])
            kind = options.pop("optimizer")
            options.pop("world_size")
            results.append(trained(wrap, init, kind, data, options))
        return results

    for rank, results in enumerate(run_ranks(2, all_cases)):
        for case, found in zip(table["cases"], results, strict=True):
            recorded = torch.tensor(case["ranks"][rank]["traj"], dtype=torch.float64)
            torch.testing.assert_close(found, recorded, rtol=1e-9, atol=1e-9, msg=str(case["cfg"]))


def trained(wrap, init, kind, data, options):
    """Return this rank's parameters after every step."""
    rank = torch.distributed.get_rank()
    params = [p.clone().requires_grad_() for p in init[rank]]
    optimizer = wrap(INNER[kind](params), **options)
    seen = []
    for xs, ys in data:
        optimizer.zero_grad()
        loss_of(params, xs[rank], ys[rank]).backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten() for p in params]))
    return torch.stack(seen)


def mean(workers):
    """Return the mean of the workers' parameters."""
    columns = zip(*(worker.params for worker in workers), strict=True)
    return [torch.stack([p.detach() for p in column]).mean(dim=0) for column in columns]


def average_states(workers):
    """Average Adam's moments, as fairseq does; do nothing for other optimizers."""
    for i in range(len(workers[0].params)):
        states = [worker.optimizer.state[worker.params[i]] for worker in workers]
        for name in ("exp_avg", "exp_avg_sq"):
            if name in states[0]:
                average = torch.stack([state[name] for state in states]).mean(dim=0)
                for state in states:
                    state[name].copy_(average)


def train(init, kind, data, outer, *, every, warmup=0, average_sync=False):
    """Return each worker's parameters after every step.

    `outer(rank, anchor, mean)` is the next anchor, as the worker of that rank computes it.
    """
    workers = [Worker(start, kind) for start in init]
    anchors = [[p.detach().clone() for p in worker.params] for worker in workers]
    seen: list[list] = [[] for _ in workers]
    for step, (xs, ys) in enumerate(data, 1):
        for worker, x, y in zip(workers, xs, ys, strict=True):
            worker.step(x, y)
        if step == warmup:
            for worker in workers:
                worker.set([p.detach() for p in workers[0].params])
            anchors = [[p.detach().clone() for p in worker.params] for worker in workers]
            if average_sync:
                average_states(workers)
            else:
                for worker in workers:
                    worker.reset_state()
        if step > warmup and step % every == 0:
            average = mean(workers)
            anchors = [outer(rank, anchor, average) for rank, anchor in enumerate(anchors)]
            for worker, anchor in zip(workers, anchors, strict=True):
                worker.set(anchor)
            if average_sync:
                average_states(workers)
        for rank, worker in enumerate(workers):
            seen[rank].append([p.detach().clone() for p in worker.params])
    return seen
