"""Join a run that an engine starts: ranks, checkpoints and stop notices.

Engines are torchrun, `manyhands run`, Ray Train, Slurm, submitit, Open MPI and Kubeflow.

    job = mh.start()                          join the other ranks
    job.load(model=model, optimizer=optimizer)
    while training:
        take_a_step()
        if mh.stopping(optimizer):            stop notice, equal on all ranks
            job.save(model=model, optimizer=optimizer, step=step)
            job.leave()                       exit as the engine expects

    _places.py      rank and address from the environment variables of each engine
    _ray.py         ranks, checkpoints and stop notices of Ray Train
    _stopping.py    stop notices, and `mh.stopping`
    _hanging.py     end a process that hangs after a stop notice
    _job.py         `mh.start` and `Job`
    survive/        synchronous training that survives lost ranks
"""
