"""Strategies as graphs of tasks: a block of local steps is a task, executed by processes, dask or Ray."""
