"""Data that is seen once, whoever comes and goes: `Cursor`, and the arithmetic below it.

A step's samples pass through the files in this order; below `Cursor` they are integers.

    _order.py    the permutation of an epoch: from positions to samples
    _shards.py   `DataShards`: samples that are read in order, and the order that suits them
    _spans.py    ranges of positions
    _ledger.py   which positions are free, held by a worker, or committed
    _rules.py    what a position refers to: the arguments, checked, and equal on all ranks
    _account.py  the ledger as one worker knows it, and what this worker took since the last commit
    _passes.py   a step's positions divided among ranks and passes
    _plan.py     the passes of a rank, as torch's loader asks for them
    _cursor.py   `Cursor`: the loop over all of this
"""
