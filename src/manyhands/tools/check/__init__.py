"""Check whether a training script trains on multiple ranks as in one process.

_judge.py             compare the runs, and make the verdict
_runs.py              run the ranks, and one process with the ranks' batches
_job.py               the script, and the conditions of a run
_processes.py         start the processes of a run, and read the records

In each process:
_machine.py           replace GPUs, NCCL and low precisions
_noise.py             switch dropout off, and draw equal numbers for all samples
_files.py             copy files before a change, and restore the files
_recorder.py          record modules, passes and optimizer steps
_loaders.py           record batches, or replace them by the ranks' batches
_feed.py              replay the ranks' batches in one process
_state.py             record state that influences the loss
_batches.py           map, hash and join nested batches

Between runs:
_records.py           the record of a process
_compare.py           distances between two runs
_case.py              the records that hypotheses read
_rank_causes.py       hypotheses about the ranks' records
_gradient_causes.py   hypotheses about the difference between the ranks and one process
resume/               check whether a killed script resumes like a run without interruption
_report.py            findings, and the verdict as text and as JSON
"""

from manyhands.tools.check._judge import check_script as check_script
from manyhands.tools.check._report import EXCEPTIONS as EXCEPTIONS
from manyhands.tools.check._report import Verdict as Verdict
