"""Data sets, blocked arrays, and distribution of samples over workers and epochs."""
