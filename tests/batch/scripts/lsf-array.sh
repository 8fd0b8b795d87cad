#!/bin/bash
#BSUB -J "mine-array-2[2-4]%2"
#BSUB -n 128
#BSUB -R "span[ptile=64] affinity[core(2)]"
#BSUB -W 01:30
#BSUB -o results/mine/jobs/mine-array-2.%J_%I.txt
#BSUB -gpu num=4
#BSUB -P proj
#BSUB -q fast
#BSUB -Q "138"
#BSUB --exclusive

module load gcc openmpi || exit 2
export PATH="$HOME/venv/bin:$PATH"
export SCALEBENCH_LAUNCHER=mpirun
cd "${LS_SUBCWD:-.}" || exit 2

trap 'kill -USR1 ${study:-$!}' USR1
scalebench run results/mine --shard ${LSB_JOBINDEX} &
study=$!
(sleep 5100; kill -USR1 $study) > /dev/null 2>&1 &
clock=$!
wait $study
while kill -0 $study 2>/dev/null; do wait $study; done
wait $study
status=$?
kill $clock 2>/dev/null
exit $status
