#!/bin/bash
#PBS -N mine-array-2
#PBS -l select=2:ncpus=128:mpiprocs=64:ngpus=4
#PBS -l walltime=01:30:00
#PBS -j oe
#PBS -o results/mine/jobs/
#PBS -A proj
#PBS -q fast
#PBS -J 2-4%2
#PBS --exclusive

module load gcc openmpi || exit 2
export PATH="$HOME/venv/bin:$PATH"
export SCALEBENCH_LAUNCHER=mpirun
cd "${PBS_O_WORKDIR:-.}" || exit 2

trap 'kill -USR1 ${study:-$!}' USR1
scalebench run results/mine --shard ${PBS_ARRAY_INDEX} &
study=$!
(sleep 5100; kill -USR1 $study) > /dev/null 2>&1 &
clock=$!
wait $study
while kill -0 $study 2>/dev/null; do wait $study; done
wait $study
status=$?
kill $clock 2>/dev/null
if [ $status -eq 138 ]; then   # stopped in time, with runs left
    scalebench submit results/mine --shard ${PBS_ARRAY_INDEX}
fi
exit $status
