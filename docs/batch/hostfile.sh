#!/bin/bash
# Hosts without a scheduler, reached by ssh without a password; mpirun of Open MPI 5.
set -e
source "$HOME/scalebench/bin/activate"

export PRTE_MCA_prte_default_hostfile="$PWD/hosts.txt"   # lines such as: node1 slots=32
scalebench run study.yaml --output results
