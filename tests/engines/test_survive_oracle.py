"""Hundreds of random faults over two networks, compared with a run without faults."""

import random

import pytest

from helpers.crew_workers import Store
from helpers.surviving import NEEDS_TORCH, STALL, SurvivingRanks
from helpers.surviving_script import Options

pytestmark = [NEEDS_TORCH, pytest.mark.long]
FAULTS = 100  # of each run
STOPS = [0.1, 0.5, 1.5, STALL + 2.0]  # seconds
CUTS = [0.3, 1.5, STALL + 2.0]


class Chaos:
    """Random faults of a run. At least `least` ranks that have the state stay alive."""

    def __init__(self, run, networks, least, seed):
        self.run = run
        self.networks = networks
        self.least = least
        self.draw = random.Random(seed)
        self.counts = {kind: 0 for kind in self.kinds()}

    def kinds(self):
        return {
            "kill": (self.kill, 10),
            "two kills": (self.kill_two, 4),
            "stop": (self.stop, 4),
            "stop and kill": (self.stop_and_kill, 2),
            "cut": (self.cut, 2),
            "cut and kill": (self.cut_and_kill, 1),
            "cut of the store": (self.cut_store, 1),
        }

    def fault(self):
        """Cause a fault, and wait until training continues."""
        self.run.until(lambda: len(self.run.joined()) > self.least, timeout=60)
        kinds = self.kinds()
        weights = [weight for _, weight in kinds.values()]
        (kind,) = self.draw.choices(list(kinds), weights)
        kinds[kind][0]()
        self.counts[kind] += 1
        self.run.report = self.draw.random() < 0.9
        self.run.sleep(self.draw.uniform(0.0, 0.6))
        self.run.wait_for_commits(1, timeout=60)

    def kill(self, among=None):
        joined = self.run.joined()
        candidates = joined if among is None else [each for each in joined if each in among]
        if candidates and len(joined) > self.least:
            self.run.kill(self.draw.choice(candidates))

    def kill_two(self):
        joined = self.run.joined()
        if len(joined) > self.least + 1:
            self.run.kill(*self.draw.sample(joined, 2))
        else:
            self.kill()

    def stop(self):
        self.run.stop(self.draw.choice(self.run.joined()), self.draw.choice(STOPS))

    def stop_and_kill(self):
        joined = self.run.joined()
        if len(joined) <= self.least + 1:
            return self.stop()
        stopped = self.draw.choice(joined)
        self.run.suspend(stopped)
        self.run.sleep(self.draw.choice(STOPS) / 2)
        self.kill([each for each in joined if each != stopped])
        self.run.sleep(self.draw.choice(STOPS) / 2)
        self.run.resume(stopped)

    def cut(self, *hosts):
        hosts = hosts or self.draw.choice([("far",), ("near", "far")])
        self.networks.drop(*hosts)
        # Both sides reach the store, and wait for each other.
        self.run.sleep(self.draw.choice(CUTS))
        self.networks.mend(*hosts)

    def cut_and_kill(self):
        near = [worker for worker in self.run.joined() if self.run.hosts[worker] == "near"]
        self.networks.drop("far")
        self.run.sleep(self.draw.choice(CUTS) / 2)
        if len(near) > self.least:
            self.kill(near)
        self.run.sleep(self.draw.choice(CUTS) / 2)
        self.networks.mend("far")

    def cut_store(self):
        self.cut("store")


@pytest.mark.parametrize(("near", "far", "quorum", "seed"), [(3, 1, 2, 1), (5, 3, 3, 2)])
def test_each_step_equals_the_step_of_a_run_without_faults(
    networks, tmp_path, near, far, quorum, seed
):
    ranks = near + far
    with (
        Store(networks.address("store")) as store,
        SurvivingRanks(
            tmp_path, ranks, Options(epochs=0, pause=0.05), store=store, networks=networks,
            quorum=quorum,
        ) as run,
    ):  # fmt: skip
        run.start(*range(near), host="near")
        run.start(*range(near, ranks), host="far")
        run.wait_for_commits(2, ranks=ranks, timeout=90)
        chaos = Chaos(run, networks, quorum, seed)
        for _ in range(FAULTS):
            chaos.fault()
        run.report = True
        run.wait_for_commits(2, ranks=ranks, timeout=90)
        run.finish(timeout=120)
        commits = run.check()
        print(chaos.counts, len(commits), "steps", len(run.events("failed")), "failed attempts")
        sizes = {commit["ranks"] for commit in commits.values()}
        assert len(sizes) > 1
