#!/bin/bash
# No MPI at all: srun starts the ranks, which find each other over TCP. gloo and DDP.
#SBATCH --job-name=scalebench
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=32
#SBATCH --cpus-per-task=2                    # gloo moves bytes in a thread beside the one that computes
#SBATCH --time=02:00:00

source "$HOME/scalebench/bin/activate"

# Only where the first node has several networks, or its name does not lead to it:
# export MASTER_ADDR=$(hostname --ip-address) GLOO_SOCKET_IFNAME=ib0
scalebench run study.yaml --launcher srun --engine gloo --output results
