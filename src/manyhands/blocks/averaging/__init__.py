"""Run a sync round: payloads go in on every worker, and their mean comes out on all workers.

In the order in which a tensor meets them:

_payload.py  contributions of a worker: payloads, buffers, optimizer state, work, and a report
_round.py    the round and its statistics: thread, chunks in flight, decision, drift
_codec.py    flat values as few bytes, and back
_chunks.py   a range of a payload on its way: all_reduce, shared memory, or encoded, in pairs

Parameters come as differences from the anchor; those payloads are in `blocks/_anchor.py`.
"""
