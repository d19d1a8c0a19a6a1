"""Connect ranks in process groups, and exchange messages. Imports no public package.

ranks.py              the ranks of a process group: identity, numbers and text between them
slices.py             reduce_scatter and all_gather of the slices of a bucket; through shared memory
groups.py             process groups of our own, ended with their last user
sockets.py            find the sockets that torch and gloo have opened in this process
message_box.py        texts that processes leave for each other in a store, and heartbeats
presence.py           which ranks have ended or wait elsewhere; explain errors of connections
standstill.py         does a thread stand still, and where?
dry_run.py            one rank of many, whose others do not exist: count what it sends
agreement.py          all ranks agree, or all raise
sharded_gradient.py   gradients of which each rank holds slices, and their norm
stop_notice.py        whether this process was asked to stop
received.py           tensors that came from other workers, which no file may replace
"""
