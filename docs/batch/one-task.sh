#!/bin/bash
# One task on each node, which computes in threads on all cores but one: that moves bytes.
#SBATCH --job-name=scalebench
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --time=02:00:00

module load gcc openmpi
source "$HOME/scalebench/bin/activate"

threads=$((SLURM_CPUS_PER_TASK > 1 ? SLURM_CPUS_PER_TASK - 1 : 1))
scalebench run study.yaml --set threads_per_worker=$threads --output results
