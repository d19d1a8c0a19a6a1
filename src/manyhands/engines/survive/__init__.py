"""Synchronous training that survives lost ranks: `mh.start(survive=True)`.

Each rank is a worker of a crew. All workers form torch's default process group, whose members
change without a restart. A step is atomic: either all ranks step, or all ranks repeat the step.

    _start.py   join the run, and leave it
    _steps.py   agree on each step; after a failure, meet and repeat the step (`SurvivingRun`)
    _state.py   the objects of the run: send to joiners, restore before a repeated step
    _messages.py  waits that an abort can end
    _ddp.py     averages of `DistributedDataParallel` that fail without an error in the loop
    _group.py   the default process group, with torch's experimental functions
"""
