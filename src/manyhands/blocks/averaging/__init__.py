"""A sync round: all workers contribute payloads and receive the mean.

Modules, in the order of a tensor:

_payload.py  contributions of a worker: payloads, buffers, optimizer state, work, report
_round.py    the round and statistics: thread, chunks in flight, agreement, drift
_codec.py    encoding of flat values in few bytes
_chunks.py   ranges of a payload in flight: all_reduce, shared memory, or pairwise messages

Payloads of parameters are differences from the anchor (`blocks/_anchor.py`).
"""
