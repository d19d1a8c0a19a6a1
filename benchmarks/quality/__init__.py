"""The parts of `benchmarks/quality.py`: workloads, and training (which runs, and one of them)."""
