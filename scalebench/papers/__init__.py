"""Published studies made again: their studies at a scale, their numbers, ours beside them, and verdicts on claims."""
