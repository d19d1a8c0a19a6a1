"""Check whether a training script trains on multiple ranks as in a single process.

_judge.py             compare the runs and make the verdict
_runs.py              run the ranks, and replay their batches in a single process
_job.py               the script, with the conditions of a run
_processes.py         start the processes of a run and read the records

In each process:
_machine.py           replace GPUs, NCCL and low precisions
_noise.py             switch dropout off, and draw equal numbers for all samples
_files.py             copy files before changes, and restore files
_recorder.py          record modules, passes and optimizer steps
_loaders.py           record or replace the batches of loaders
_feed.py              supply a replay with the ranks' batches
_state.py             record state that influences the loss
_batches.py           map, hash and join nested batches

Between runs:
_records.py           the record of a process
_compare.py           distances between two runs
_case.py              the records for hypotheses
_rank_causes.py       hypotheses about the ranks' records
_gradient_causes.py   hypotheses about the first difference from the replay
resume/               check whether a killed script resumes correctly
_report.py            findings, and verdicts in text and JSON
"""

from manyhands.tools.check._judge import check_script as check_script
from manyhands.tools.check._report import EXCEPTIONS as EXCEPTIONS
from manyhands.tools.check._report import Verdict as Verdict
