"""One sync round: payloads go in on every worker, and their mean comes out on all of them.

In the order in which a tensor meets them:

_extras.py    buffers, optimizer state and gradients as payloads
_payload.py   the vocabulary: Payload, Note, PayloadChunk, RoundResult; is a payload finite?
_average.py   cut payloads into chunks, keep a few in flight, check that workers agree; chunks
              without a codec: one all_reduce, or shared memory
_pairwise.py  a chunk with a codec: two messages between each pair of workers

Parameters come as differences from the anchor; those payloads are in `blocks/_anchor.py`.
"""
