"""One sync round: payloads go in on every worker, and their mean comes out on all of them.

In the order in which a tensor meets them:

_extras.py         buffers, optimizer state and gradients as payloads
_finite.py         is every number finite? (a worker with a NaN is left out of the mean)
_payload.py        the vocabulary: Payload, Note, PayloadChunk, RoundResult
_average.py        cut payloads into chunks, keep a few in flight, check that workers agree
_allreduce.py      a chunk without a codec: one all_reduce
_pairwise.py       a chunk with a codec: two messages between each pair of workers
_shared_memory.py  a chunk among workers of one host: read each other's memory

Parameters come as differences from the anchor; those payloads are in `blocks/_anchor.py`.
"""
