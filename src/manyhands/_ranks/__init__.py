"""Connect ranks in process groups, and exchange messages. Imports no public package.

ranks.py              the ranks of a process group: numbers, text and tensors between ranks
slices.py             reduce_scatter and all_gather of the slices of a bucket; shared memory
groups.py             exclusive process groups; sockets of torch and gloo
message_box.py        texts and heartbeats in a store
presence.py           ranks that have ended or wait elsewhere; errors of lost connections
standstill.py         whether and where a thread stands still
dry_run.py            a single rank of a large group, with counted messages
fake_tensors.py       tensors without memory, for dry runs of models larger than memory
agreement.py          compare facts between ranks; all ranks agree, or all ranks raise
sharded_gradient.py   gradients in slices on multiple ranks, and their norm
stop_notice.py        whether this process was asked to stop
received.py           tensors from other workers, which loads must not overwrite
"""
