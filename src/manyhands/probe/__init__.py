"""A probe that decides: the largest batch that loses nothing, tried out in branches of the run.

_branches.py   each branch: the state it starts from, its training, its held-out losses
_verdict.py    arithmetic: which branches are level with that of scale 1, from paired losses
_result.py     what was found: a table and a figure
_probe.py      `probe_batch`: checks, budget, and the order of it all
"""

from manyhands.probe._probe import probe_batch
from manyhands.probe._result import ProbeResult

__all__ = ["ProbeResult", "probe_batch"]
