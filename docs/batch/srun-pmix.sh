#!/bin/bash
# Ranks of MPI and Horovod started by srun, where `srun --mpi=list` names pmix.
#SBATCH --job-name=scalebench
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=64
#SBATCH --time=02:00:00

module load gcc openmpi
source "$HOME/scalebench/bin/activate"

scalebench run study.yaml --launcher srun --output results
