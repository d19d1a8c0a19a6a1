"""Join a run that an engine starts: ranks, checkpoints and stop notices.

An engine is torchrun, `manyhands run`, Ray Train, Slurm, submitit, Open MPI or Kubeflow.
A script names none of them:

    job = mh.start()                          who am I? Meet the other ranks
    job.load(model=model, optimizer=optimizer)
    while training:
        take_a_step()
        if mh.stopping(optimizer):            asked to stop: the same answer on all ranks
            job.save(model=model, optimizer=optimizer, step=step)
            job.leave()                       ends as the engine expects

    _places.py      who this process is, from the environment variables of each engine
    _ray.py         the same from Ray Train, with its checkpoints and its notice
    _stopping.py    a stop notice, and `mh.stopping`: one answer of all ranks
    _hanging.py     end a process that was asked to stop, and hangs
    _job.py         `mh.start` and `Job`: the engine as a script sees it
"""
