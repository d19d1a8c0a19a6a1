"""What `benchmarks/checkpoints.py` compares, and its page."""
