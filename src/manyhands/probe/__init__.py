"""A probe that decides: the largest batch that loses nothing, tried out in branches of the run.

_snapshot.py   the state that every branch starts from, and that the run gets back
_branches.py   train each branch on the same samples, and take its held-out losses
_verdict.py    arithmetic: which branches are level with that of scale 1, from paired losses
_result.py     what was found: a table and a figure
_probe.py      `probe_batch`: checks, budget, and the order of it all
"""

from manyhands.probe._probe import probe_batch
from manyhands.probe._result import ProbeResult

__all__ = ["ProbeResult", "probe_batch"]
