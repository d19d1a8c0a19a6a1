"""torchft's recorded DiLoCo run in which a worker fails and recovers, with a crew.

`FIRST` and `SECOND` have the parameters of two layers before every step, from the fixture
`test_diloco_mocked_failure_recovery_0.json` of torchft (7eb7087). The model is that of
`tests/blocks/test_mix.py`. The second worker fails after two sync rounds, and a new process joins.
"""

import os
import signal
import time

import torch
from torch import nn

import manyhands as mh
from helpers.crew_workers import Store, Workers

FIRST = [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59, -61, -63, -65]
FIRST += [-67, -69, -83]
SECOND = [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53, -55, -57, -71]
SECOND += [-73, -75, -77]
STEPS = len(FIRST)


class Layers(Workers):
    def work(self, make_crew, log, dies_after=None):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for param in model.parameters():
            nn.init.ones_(param)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        crew = make_crew()
        outer = {"lr": 2.0, "momentum": 0.0, "every": 6, "fragments": 2, "codec": "float32"}
        optimizer = mh.DiLoCo(inner, crew=crew, **outer)
        while True:
            log("before", steps=optimizer.steps, values=[p.item() for p in model.parameters()])
            if optimizer.steps == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if optimizer.steps == STEPS - 1:
                break
            while optimizer.steps == 8 and not (self.folder / "waiting").exists():
                time.sleep(0.01)
            for param in model.parameters():
                param.grad = torch.full_like(param, 2.0)
            optimizer.step()
        optimizer.finish()


def test_a_worker_fails_and_recovers_as_in_torchft(tmp_path):
    with Store() as store, Layers(store, tmp_path, expected=2, stall=5.0, quorum=2) as workers:
        workers.start([0])
        workers.start([1], dies_after=6)
        workers.until(lambda: workers.ended() == {1: -signal.SIGKILL})
        workers.shared.report_end(1)
        workers.start([1])
        workers.until(lambda: workers.shared.refresh().waiting != ())
        (tmp_path / "waiting").touch()
        workers.finish(60.0)
        survivor = [e["values"] for e in workers.events(0, "before")]
        joined = [e for e in workers.events(1, "before") if e["incarnation"] == 2]
        first = joined[0]["steps"]
        assert first == 9  # as in the record, in the next sync round
        # The first layer's round lets the worker in. In torchft the worker then continues with the
        # survivor's values; in manyhands with the anchor, so in the second layer's next round the
        # worker sends three steps of 2, not six, and the outer step (lr=2) of the mean is 6 less.
        second = SECOND[:12] + [value + 6 for value in SECOND[12:]]
        assert survivor == [list(pair) for pair in zip(FIRST, second, strict=True)]
        assert [e["values"] for e in joined][3:] == survivor[first + 3 :]
        assert [e["values"][0] for e in joined] == FIRST[first:]
        assert [e["values"][1] for e in joined][:3] == [-23, -25, -27]  # from the anchor
