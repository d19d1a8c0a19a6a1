"""Give each sample once in an epoch, across restarts and changes of workers: `Cursor`.

A step's samples pass through the files in this order; below `Cursor` they are integers.

    _ledger.py   which positions are free, held by a worker, or committed
    _order.py    from positions to samples: an epoch's permutation, `DataShards`
    _rules.py    what a position refers to: the arguments, checked, and equal on all ranks
    _account.py  the ledger as one worker knows it, and what this worker took since the last commit
    _plan.py     steps divided among ranks and passes, as torch's loader asks for them
    _cursor.py   `BaseCursor` and `MapCursor`: the loop over all of this
    _stream.py   `StreamCursor`: the loop over shards whose samples have no index
    _make.py     `Cursor` chooses one of them
"""

from manyhands.data._cursor import BaseCursor, MapCursor
from manyhands.data._stream import StreamCursor

__all__ = ["BaseCursor", "MapCursor", "StreamCursor"]

for _public in (BaseCursor, MapCursor, StreamCursor):
    _public.__module__ = __name__  # what tracebacks and help() show
