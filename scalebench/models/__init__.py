"""Models, losses and metrics. Model options are validated without importing torch."""
