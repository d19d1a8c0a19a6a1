#!/bin/bash
#SBATCH --job-name=manyhands-crew
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --no-kill
#SBATCH --output=%x-%j.out

# Each task is a worker of a crew. When a node fails, the workers on other nodes continue.

store=$(hostname -i | cut -d' ' -f1)
export MANYHANDS_STORE=$store:29400 MANYHANDS_WORKERS=$SLURM_NTASKS MANYHANDS_RUN=$SLURM_JOB_ID
MANYHANDS_SECRET=$(python -c "import secrets; print(secrets.token_hex())")
export MANYHANDS_SECRET
python -c "
import time
from torch.distributed import TCPStore
store = TCPStore('0.0.0.0', 29400, is_master=True, wait_for_workers=False)
time.sleep(10**9)" &
served=$!
srun --no-kill --kill-on-bad-exit=0 \
    bash -c 'MANYHANDS_WORKER=$SLURM_PROCID exec python train.py --blocks --steps 100000'
code=$?
kill "$served"
exit "$code"
