"""What the three benchmarks of sharding share: a model, contenders, their ranks and traffic."""
