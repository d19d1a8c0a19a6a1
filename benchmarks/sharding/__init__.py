"""What the three benchmarks of sharding share: a model, who trains it, its ranks and traffic."""
