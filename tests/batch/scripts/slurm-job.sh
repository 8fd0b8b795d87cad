#!/bin/bash
#SBATCH --job-name=mine-shard-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=64
#SBATCH --cpus-per-task=1
#SBATCH --time=01:30:00
#SBATCH --output=results/mine/jobs/%x.%j.txt
#SBATCH --open-mode=append
#SBATCH --account=proj
#SBATCH --partition=fast
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --exclusive

module load gcc openmpi || exit 2
export PATH="$HOME/venv/bin:$PATH"
export SCALEBENCH_LAUNCHER=mpirun
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

trap 'kill -USR1 ${study:-$!}' USR1
scalebench run results/mine --shard 1 &
study=$!
wait $study
while kill -0 $study 2>/dev/null; do wait $study; done
wait $study
status=$?
if [ $status -eq 138 ]; then   # stopped in time, with runs left
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
