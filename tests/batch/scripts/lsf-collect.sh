#!/bin/bash
#BSUB -J "mine-collect"
#BSUB -n 1
#BSUB -R "span[ptile=1] affinity[core(1)]"
#BSUB -W 00:10
#BSUB -o results/mine/jobs/mine-collect.%J.txt

source site.sh
cd "${LS_SUBCWD:-.}" || exit 2

apptainer exec scalebench.sif scalebench collect results/mine
