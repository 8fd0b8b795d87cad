#!/bin/bash
#SBATCH --job-name=mine-collect
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
#SBATCH --output=results/mine/jobs/%x.%j.txt
#SBATCH --open-mode=append

source site.sh
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

apptainer exec scalebench.sif scalebench collect results/mine
