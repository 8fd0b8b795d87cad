"""Builds what no registry has ready: Horovod for the PyTorch, MPI and compiler that are here."""
