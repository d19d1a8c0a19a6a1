"""Give each sample once per epoch, across restarts and changes of workers: `Cursor`.

The samples of a step pass through the files in this order. Below `Cursor` they are integers.

    _ledger.py   free, held and committed positions
    _order.py    from positions to samples: an epoch's permutation, `DataShards`
    _rules.py    the arguments, checked and equal on all ranks
    _account.py  a worker's ledger, and samples since the last commit
    _plan.py     divide steps among ranks and passes, for torch's loader
    _cursor.py   `BaseCursor` and `MapCursor`: the loop
    _stream.py   `StreamCursor`: the loop over shards whose samples have no index
    _make.py     `Cursor` selects the class
"""

from manyhands.data._cursor import BaseCursor, MapCursor
from manyhands.data._stream import StreamCursor

__all__ = ["BaseCursor", "MapCursor", "StreamCursor"]

for _public in (BaseCursor, MapCursor, StreamCursor):
    _public.__module__ = __name__  # what tracebacks and help() show
