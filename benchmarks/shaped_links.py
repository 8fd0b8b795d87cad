"""Predicted against measured times on links of a stated rate, between hosts on this machine.

    python benchmarks/shaped_links.py OUTPUT [--rates 37 100] [--hosts 8] [--calibrated 4] [--sizes 256k 1m 4m]

Needs root, and the tools of tests/hosts/machines.py: each host is a set of namespaces,
its link shaped by `tc tbf`. For each rate: a raw ring of sockets beside, `scalebench
calibrate` on the first of the hosts, and paced studies on 1 to all of them, of models
whose gradients have the stated sizes. `scalebench validate` then predicts them from
collectives measured on all node counts of the calibration, and on two nodes alone.
MPI's allreduce is a ring, as `scalebench doctor` advises. What exists in OUTPUT is
kept: an interrupted command goes on. Two cores bound rates above some 100 Mbit/s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the hosts of the tests

from scalebench.calibration.calibration_file import read_calibration
from scalebench.cluster.cluster_file import preset
from scalebench.install.examine import RING
from tests.hosts.conftest import reached_by_name
from tests.hosts.machines import Host, Hosts, why_not

SCALEBENCH = Path(sys.executable).with_name("scalebench")
HIDDEN = {
    "64k": (96, 96),
    "256k": (256, 180),
    "1m": (512, 430),
    "4m": (1024, 945),
}  # of the model: bytes of gradients
STRATEGIES = {
    "gloo": "[allreduce, ddp, {local_sgd: {steps: 4}}, epoch_average]",
    "mpi": "[allreduce, epoch_average]",
}
STUDY = """\
name: {name}
dataset: {{synthetic: {{n_train: 64, n_test: 64, features: 64}}}}
model: {{mlp: {{hidden: [{hidden}]}}}}
scaling: weak
batch_per_worker: 8
epochs: 1
lr: 0.001
warmup_steps: 2
evaluate_every: 0
workers: {workers}
strategies: {strategies}
engine: {engine}
execution: paced
device_step_time: {step_s}
cluster: cluster.yaml
calibration: calibration-{rate}.json
repetitions: {repetitions}
"""
_RING_BYTES = 4_000_000
_RING = """
import socket, sys, threading, time
here, after, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
listener, onward = socket.create_server((here, 5555)), None
while onward is None:
    try:
        onward = socket.create_connection((after, 5555), timeout=5)
    except OSError:
        time.sleep(0.1)
before, _ = listener.accept()
onward.settimeout(None)
onward.sendall(b"x")
before.recv(1)
began = time.perf_counter()
sender = threading.Thread(target=onward.sendall, args=(bytes(nbytes),))
sender.start()
left = nbytes
while left:
    left -= len(before.recv(1 << 16))
sender.join()
print(nbytes / (time.perf_counter() - began))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "output", type=Path, help="folder of studies, calibrations and predictions"
    )
    parser.add_argument(
        "--rates", nargs="+", type=int, default=[37, 100], metavar="MBIT"
    )
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument(
        "--calibrated", type=int, default=4, help="hosts of the calibration"
    )
    parser.add_argument(
        "--sizes", nargs="+", choices=HIDDEN, default=["256k", "1m", "4m"]
    )
    parser.add_argument(
        "--engines", nargs="+", choices=STRATEGIES, default=list(STRATEGIES)
    )
    parser.add_argument(
        "--step-time",
        type=float,
        default=0.25,
        metavar="SECONDS",
        help="of the paced device",
    )
    parser.add_argument("--repetitions", type=int, default=3)
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    asked.output.mkdir(parents=True, exist_ok=True)
    text = (
        preset("this-machine")
        .read_text()
        .replace("workers_per_node: this-machine", "workers_per_node: 1")
    )
    (asked.output / "cluster.yaml").write_text(text)
    for rate in asked.rates:
        with tempfile.TemporaryDirectory(
            prefix="scalebench-shaped-", ignore_cleanup_errors=True
        ) as folder:
            Path(folder).chmod(0o755)
            hosts = Hosts(Path(folder), asked.hosts, f"{rate}mbit")
            try:
                _measure(hosts, rate, asked)
            finally:
                hosts.close()
    _validate(asked)


def _measure(hosts: Hosts, rate: int, asked: argparse.Namespace) -> None:
    """Calibrate on the first hosts, then run the studies on all; what exists is kept."""
    # Ranks of all hosts share two cores here: one that waits for a message leaves its
    # core to the others.
    environment = reached_by_name(hosts) | RING | {"OMPI_MCA_mpi_yield_when_idle": "1"}
    few = hosts.folder / "few"
    few.write_text(
        "".join(f"{node.name} slots=1\n" for node in hosts.nodes[: asked.calibrated])
    )
    counts = [1 << power for power in range(asked.hosts.bit_length())]
    calibration, example = asked.output / f"calibration-{rate}.json", ""
    for engine in asked.engines:
        for size in asked.sizes:
            name = f"shaped-{rate}-{engine}-{size}"
            file, hidden = (
                asked.output / f"{name}.yaml",
                ", ".join(map(str, HIDDEN[size])),
            )
            values = {
                "strategies": STRATEGIES[engine],
                "workers": counts,
                "step_s": asked.step_time,
            }
            values |= {"name": name, "hidden": hidden, "engine": engine, "rate": rate}
            file.write_text(STUDY.format(**values, repetitions=asked.repetitions))
            example = example or file.name
            if not calibration.exists():
                words = [
                    "calibrate",
                    example,
                    "--batch",
                    "8",
                    "--noisy",
                    "--calibration-budget-s",
                    "60",
                ]
                there = environment | {"PRTE_MCA_prte_default_hostfile": str(few)}
                _scalebench(
                    hosts.nodes[0],
                    [*words, "-o", calibration.name],
                    asked.output,
                    there,
                )
            _ring(hosts, rate, asked)
            _scalebench(
                hosts.nodes[0],
                ["run", file.name, "--output", "results"],
                asked.output,
                environment,
            )
    _ring(hosts, rate, asked)


def _scalebench(
    host: Host, words: list[str], folder: Path, environment: dict[str, str]
) -> None:
    print("scalebench", *words, flush=True)
    with (folder / "log.txt").open("a") as log:
        process = host.start(
            [SCALEBENCH, *words],
            cwd=folder.resolve(),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        print(f"ended with {process.wait()}", flush=True)


def _ring(hosts: Hosts, rate: int, asked: argparse.Namespace) -> None:
    """Append the share of the stated rate that a ring of plain sockets reaches among all hosts."""
    nodes = hosts.nodes
    starts = [
        node.start(
            [
                sys.executable,
                "-c",
                _RING,
                node.address,
                nodes[(place + 1) % len(nodes)].address,
                str(_RING_BYTES),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        for place, node in enumerate(nodes)
    ]
    shares = [
        8e-6 * float(process.communicate(timeout=120)[0]) / rate for process in starts
    ]
    load = os.getloadavg()[0]
    path = asked.output / "raw-ring.csv"
    if not path.exists():
        path.write_text("rate_mbit,hosts,least_share,median_share,load\n")
    with path.open("a") as file:
        file.write(
            f"{rate},{len(nodes)},{min(shares):.3f},{median(shares):.3f},{load:.1f}\n"
        )


def _validate(asked: argparse.Namespace) -> None:
    """Price all studies by the calibration of their rate, then by the part of it that two nodes measured."""
    for rate in asked.rates:
        whole = read_calibration(asked.output / f"calibration-{rate}.json")
        pair = [entry for entry in whole.engines.entries if entry.nodes <= 2]
        engines = whole.engines.model_copy(update={"entries": pair})
        whole.model_copy(update={"engines": engines}).save(
            asked.output / f"calibration-{rate}-two-nodes.json"
        )
        studies = sorted((asked.output / "results").glob(f"shaped-{rate}-*"))
        for kind in ("", "-two-nodes"):
            file, place = (
                asked.output / f"calibration-{rate}{kind}.json",
                asked.output / f"predicted-{rate}{kind}",
            )
            words = [
                "validate",
                *map(str, studies),
                "--calibration",
                str(file),
                "--output",
                str(place),
            ]
            print(f"calibrated by {file.name}", flush=True)
            subprocess.run([SCALEBENCH, *words], check=True)


if __name__ == "__main__":
    main()
