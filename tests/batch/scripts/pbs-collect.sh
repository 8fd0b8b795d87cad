#!/bin/bash
#PBS -N mine-collect
#PBS -l select=1:ncpus=1:mpiprocs=1
#PBS -l walltime=00:10:00
#PBS -j oe
#PBS -o results/mine/jobs/

source site.sh
cd "${PBS_O_WORKDIR:-.}" || exit 2

apptainer exec scalebench.sif scalebench collect results/mine
