"""Who holds what: each of N workers keeps 1/N of optimizer state and gradients."""
