#!/usr/bin/env bash
# The pictures of docs/figures.md: run the studies (minutes) in a temporary folder and draw each figure of the registry.
set -euo pipefail
images="$(cd "$(dirname "${BASH_SOURCE[0]}")/../images/figures" && pwd)"
cd "$(mktemp -d)"

simulated=(--execution virtual --cluster juwels-booster --device-step-time 0.001 --workers 1..16 --repetitions 3
  --set virtual.jitter=lognormal --set virtual.jitter_sigma=0.1)
scalebench run --name gallery "${simulated[@]}" --dataset digits --epochs 8 --lr 0.1 --set target_metric=0.85 \
  --strategy serial --strategy allreduce --strategy horovod --strategy epoch_average --strategy 'local_sgd: {steps: 8}'
scalebench run --name weak "${simulated[@]}" --set scaling=weak --epochs 3 \
  --dataset 'synthetic: {n_train: 512, n_test: 500, features: 32, classes: 5}' \
  --strategy serial --strategy allreduce --strategy epoch_average
scalebench run --name tuned "${simulated[@]}" --workers 1,8,16 --dataset digits --epochs 4 --set target_metric=0.85 \
  --strategy serial --strategy allreduce --strategy epoch_average --set 'tune={over: {lr: [0.01, 1.0]}, trials: 8}'
scalebench init
scalebench run study.yaml  # natively too, for agreement

draw() { scalebench plot "results/$1" --figure "$2" --width 7in --caption none --format png; cp "plots/$1/$2.png" "$images"; }
draw weak weak-scaling
draw my-study agreement
draw tuned tuning
for name in $(scalebench list figures | cut -d" " -f1); do
  case $name in weak-scaling | agreement | tuning) ;; *) draw gallery "$name" ;; esac
done
