"""A crew whose workers are killed and stopped while it trains, for `blocks_faults.py`.

worker.py  what each worker runs: an ordinary training script that keeps a log
ranks.py   what each rank of `survive.py` runs: synchronous training
harm.py    starts a run with `manyhands run`, and kills and stops its workers at set times
"""
