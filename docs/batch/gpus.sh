#!/bin/bash
# One worker on each GPU: nccl, and DDP on nccl.
#SBATCH --job-name=scalebench
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00

module load cuda
source "$HOME/scalebench/bin/activate"

scalebench run study.yaml --launcher srun --engine nccl --output results
