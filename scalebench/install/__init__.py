"""Build of Horovod for the installed PyTorch, MPI and compiler, and examination of the machine."""
