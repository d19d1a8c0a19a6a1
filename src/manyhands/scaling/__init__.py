"""How far to step: scaling rules, and the noise of the gradient that they need."""
