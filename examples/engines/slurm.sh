#!/bin/bash
#SBATCH --job-name=manyhands
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# One task is one rank. Two minutes before the time is up each task gets SIGUSR1, ends its step,
# saves with the others, and leaves with code 75. The job is then put into the queue again.

export MANYHANDS_STOP_CODE=75
srun --kill-on-bad-exit=0 python train.py --steps 100000
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
