"""Train in blocks: workers take local steps, and synchronize once in a block.

A *block* is the local steps between two *sync rounds*: all workers' values go in, and their mean
comes out. The *anchor* is the parameters that all workers agreed on in the last round, and the
*outer step* moves it by the mean. A *fragment* is a part of the model with separate rounds. In each
round a worker's *report* describes the worker. (docs/architecture.md has more words.)

In the order in which a step meets them:

_methods.py      LocalSGD, DiLoCo, SlowMo and BMUF: Blocks with the outer step of that name
_optimizer.py    Blocks, the optimizer wrapper: options, step, save and load
_checks.py       arguments and options, checked: alone, together, and against the other workers'
_sync.py         the life of a block: send, commit, merge, undo; the steps of a warm-up
_block_state.py  the place of a worker in that life, as a value
_samples.py      the samples of a worker, and the weight of its steps in the mean
_schedule.py     after which step a fragment is sent, how long the next block is
_anchor.py       the anchor, the differences from it, and the outer steps that move it
averaging/       one sync round: from differences to their mean
crew/            elastic membership: workers that come and go
_common_state.py the state that is equal on every worker: for joiners, and to be saved
_saving.py       saving and continuing a run
"""

from manyhands.blocks._anchor import Outer
from manyhands.blocks._schedule import Every

__all__ = ["Every", "Outer"]

for _public in (Every, Outer):
    _public.__module__ = __name__  # shown by tracebacks and help()
