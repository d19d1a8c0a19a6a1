"""The parts of `benchmarks/quality.py`: workloads, plan (which runs), training (one), page."""
