"""Block training: workers take local steps and synchronize once per block.

A *block* is the local steps between two *sync rounds*. A sync round averages a value over all
workers. The *anchor* is the set of parameters that all workers agreed on in the last round. The
*outer step* moves the anchor by the mean. A *fragment* is a part of the model with separate rounds.
A *report* describes a worker in a round. docs/architecture.md defines more words.

Modules, in the order of a step:

_methods.py      LocalSGD, DiLoCo, SlowMo and BMUF: `Blocks` with different outer steps
_optimizer.py    `Blocks`, the optimizer wrapper: options, step, save and load
_checks.py       checks of arguments, combinations of options, and saved options
_start.py        agreement with the other workers, and the common initial values
_sync.py         send, commit, merge and undo sync rounds; end a warm-up
_block_state.py  a worker's place in a block, as an immutable value
_samples.py      samples of a worker, and weights in the mean
_schedule.py     steps that send fragments, and block lengths
_anchor.py       the anchor, differences from the anchor, and outer steps
averaging/       a sync round: from differences to their mean
crew/            elastic membership: workers may join and leave
_common_state.py state that is equal on all workers, for joiners and checkpoints
_saving.py       save and load
"""

from manyhands.blocks._anchor import Outer
from manyhands.blocks._schedule import Every

__all__ = ["Every", "Outer"]

for _public in (Every, Outer):
    _public.__module__ = __name__  # shown by tracebacks and help()
