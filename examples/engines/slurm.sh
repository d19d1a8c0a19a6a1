#!/bin/bash
#SBATCH --job-name=manyhands
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# Each task is a rank. Two minutes before the time limit, each task receives SIGUSR1, finishes the
# step, saves, and exits with code 75. The script then requeues the job.

export MANYHANDS_STOP_CODE=75
srun --kill-on-bad-exit=0 python train.py --steps 100000
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
