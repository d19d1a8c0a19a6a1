"""Check whether a training script trains on several ranks as in one process.

_judge.py             compare the runs, and collect the verdict
_runs.py              run several ranks, and one process with the ranks' batches
_job.py               the script, and how a run changes it
_processes.py         start the processes of a run, and read their records

In each process:
_machine.py           replace GPUs, NCCL and low precisions
_noise.py             switch dropout off, and draw the same numbers for every sample
_files.py             copy files before they change, and put them back
_recorder.py          record modules, passes and optimizer steps
_loaders.py           record batches, or give the ranks' batches
_feed.py              choose the ranks' batches for one process
_state.py             record state that influences the loss
_batches.py           map, hash and join nested batches

Between runs:
_records.py           the record that a process writes
_compare.py           distances between two runs
_case.py              the records that hypotheses about a difference look at
_rank_causes.py       hypotheses about the ranks alone
_gradient_causes.py   hypotheses about the ranks beside one process
resume/               check that a killed script resumes as if it had not been interrupted
_report.py            the verdict as text and as JSON
"""

from manyhands.tools.check._judge import check_script as check_script
from manyhands.tools.check._report import EXCEPTIONS as EXCEPTIONS
from manyhands.tools.check._report import Verdict as Verdict
