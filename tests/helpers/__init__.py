"""What the tests share: how to run ranks, the oracles, and helpers of one subject each.

ranks.py                                  run a function on several ranks; errors on ranks
pages.py                                  run the examples of the documentation
scaling_oracle.py, sharding_oracle.py, checkpoint_oracle.py, blocks_oracle.py, blocks_plain.py
                                          the one-process loops that each part must equal
ways.py, new_sharding.py                   the ways to shard; one that the library does not know
blocks_runs.py, crew_workers.py           runs in blocks; crews whose workers come and go
link.py                                   a line between two hosts that can be cut
damage.py, forge.py                       damaged checkpoints; forged checkpoints
containers.py                             every kind of container that a model may return
fairseq_bmuf.py, fairscale_on_cpu.py      what fairseq computes; fairscale without a GPU
originals.py, originals.json              the names that the original libraries documented
recorded.py, recorded_values/             values that the original libraries computed
ending_script.py                          a script for each way in which a user's script ends
"""
