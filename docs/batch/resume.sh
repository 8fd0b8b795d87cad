#!/bin/bash
# A study longer than the queue allows: it stops in time, and the job goes back into the queue until all is done.
#SBATCH --job-name=scalebench
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=64
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@300                  # five minutes before the end: finish the runs under way
#SBATCH --requeue
#SBATCH --open-mode=append

module load gcc openmpi
source "$HOME/scalebench/bin/activate"

trap 'kill -USR1 ${study:-$!}' USR1
scalebench run study.yaml --output results &
study=$!
wait $study
while kill -0 $study 2>/dev/null; do wait $study; done
wait $study
status=$?
if [ $status -eq 138 ]; then                 # stopped by the signal, after a run at least; 3: the slot is too short
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
