"""Real processes end with the weights of virtual workers; with those of heat's and torch's own code too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scalebench.comm.engines import available
from scalebench.launch.processes import environment, launch_command
from scalebench.study.spec import Component
from scalebench.virtual.engine import simulate
from tests.arrays import arrays_in
from tests.strategies import daso_case

PROGRAM = Path(__file__).parent / "programs" / "train_natively.py"
PER_NODE = 2
DASO = {"devices_per_node": 2}

MPI = {
    "daso-heat": {
        "daso-heat": {
            **DASO,
            "warm_up_epochs": 1,
            "cool_down_epochs": 1,
            "patience": 0,
            "stability": 0.5,
        }
    },
    "daso-fixed": {
        "daso-fixed": {**DASO, "global_skip": 3, "local_skip": 2, "wait": 2}
    },
    "local_sgd": {"local_sgd": {"steps": 4, "optimizer_state": "average"}},
    "post_local_sgd": {"post_local_sgd": {"start": 5, "steps": 4, "subgroup": 0}},
    "hierarchical_local_sgd": {"hierarchical_local_sgd": {"groups": {2: 2, 64: 5}}},
    "slowmo": {"slowmo": {"steps": 4}},
    "bmuf": {"bmuf": {"steps": 4}},
    "diloco": {"diloco": {"steps": 4}},
    "easgd": {"easgd": {"steps": 4}},
    "streaming_diloco": {"streaming_diloco": {"steps": 6, "delay": 2}},
    "streaming_diloco-4-bits": {"streaming_diloco": {"steps": 6, "bits": 4}},
    "sparse_loco": {"sparse_loco": {"steps": 4, "keep": 0.2, "tile": 8}},
    "noloco": {"noloco": {"steps": 4}},
    "demo": {"demo": {"k": 3, "tile": 4}},
    "sparta": {"sparta": {"share": 0.2}},
    "gossip-ring": {"gossip": {"peers": "ring"}},
    "gossip-pair": {"gossip": {"peers": "pair"}},
    "fedavg": {"fedavg": {"fraction": 0.5}},
    "fedprox": {"fedprox": {"mu": 0.1, "local_epochs": 2}},
}
MOVING = {
    "rotate_blocks": {"blocks": 8},
    "pairwise": {"blocks": 7},
    "global": {},
}  # rows change workers
GLOO = {
    "torch_local_sgd": {"torch_local_sgd": {"period": 4, "warmup": 3}},
    "torch_hierarchical_local_sgd": {
        "torch_hierarchical_local_sgd": {"groups": {2: 2, 4: 6}}
    },
    "torch_hierarchical-last-in-pairs": {
        "torch_hierarchical_local_sgd": {"groups": {2: 17, 4: 18}}
    },
    "torch_post_local_sgd": {"torch_post_local_sgd": {"start": 5, "period": 4}},
    "torch_post_local_sgd-subgroups": {
        "torch_post_local_sgd": {"start": 5, "period": 4, "subgroup": 2}
    },
    "daso-heat": MPI["daso-heat"],
    "daso-fixed": MPI["daso-fixed"],
    "gossip-ring": MPI["gossip-ring"],
    "fedavg": MPI["fedavg"],
    "streaming_diloco": MPI["streaming_diloco"],
    "sparta": MPI["sparta"],
    "demo": MPI["demo"],
    "noloco": MPI["noloco"],
    "sparse_loco": MPI["sparse_loco"],
    "streaming_diloco-4-bits": MPI["streaming_diloco-4-bits"],
}
DDP = {
    "ddp": {"ddp": {}},
    "ddp-buckets": {"ddp": {"bucket_cap_mb": 1e-4}},
    "ddp-accumulate": {"ddp": {"bucket_cap_mb": 1e-4, "accumulate": 2}},
}
DDP_COMPRESSED = {  # whose weights test_real_ranks.py compares
    "ddp-fp16": {"ddp": {"compression": "fp16", "bucket_cap_mb": 1e-4}},
    "ddp-bf16": {"ddp": {"compression": "bf16"}},
    "ddp-powersgd": {"ddp": {"compression": "powersgd", "rank": 2}},
}
REFERENCES = ["a", "b", "c", "d", "e"]
MODEL = f"{Path(__file__).parent / 'models' / 'normalised.py'}:build"  # with BatchNorm
POLICIES = {"optimizer_state": "average", "weighting": "samples"}
WITH_POLICIES = {
    "epoch_average-policies": {
        "epoch_average": {"every": 2, "trailing": "leave", **POLICIES}
    },
    "epoch_average-master": {"epoch_average": {"aggregation": "master", **POLICIES}},
    "local_sgd-policies": {"local_sgd": {"steps": 5, **POLICIES}},
    "post_local_sgd-policies": {
        "post_local_sgd": {"start": 3, "steps": 4, "trailing": "leave", **POLICIES}
    },
    "hierarchical-policies": {
        "hierarchical_local_sgd": {"groups": {2: 2, 4: 5}, **POLICIES}
    },
    "slowmo-policies": {"slowmo": {"steps": 5, **POLICIES}},
    "bmuf-policies": {"bmuf": {"steps": 5, "optimizer_state": "reset"}},
    "diloco-policies": {"diloco": {"steps": 5, "trailing": "leave", **POLICIES}},
    "streaming_diloco-policies": {
        "streaming_diloco": {"steps": 4, "fragments": 1, "bits": 8, **POLICIES}
    },
    "sparse_loco-policies": {
        "sparse_loco": {"steps": 5, "keep": 0.3, "bits": 32, **POLICIES}
    },
    "noloco-policies": {"noloco": {"steps": 5, "trailing": "leave", **POLICIES}},
    "sparta-policies": {"sparta": {"share": 0.1, **POLICIES}},
    "easgd-policies": {"easgd": {"steps": 5, **POLICIES}},
    "gossip-ring-policies": {"gossip": {"every": 2, **POLICIES}},
    "gossip-pair-policies": {
        "gossip": {"peers": "pair", "trailing": "leave", **POLICIES}
    },
    "fedavg-policies": {"fedavg": {"fraction": 0.5, "optimizer_state": "average"}},
    "fedprox-policies": {
        "fedprox": {"mu": 0.1, "weighting": "uniform", "buffers": "keep"}
    },
    "daso-fixed-policies": {
        "daso-fixed": {**DASO, "global_skip": 3, "wait": 2, **POLICIES}
    },
    "daso-heat-policies": {
        "daso-heat": {**DASO, "warm_up_epochs": 1, "cool_down_epochs": 1, **POLICIES}
    },
}
# a buffer is replaced in each forward pass; what is large is averaged where it lies
APART = "apart"
ALL_APART = {
    f"{APART}-local_sgd": {"local_sgd": {"steps": 5, **POLICIES}},
    f"{APART}-epoch_average": {"epoch_average": {"optimizer_state": "average"}},
}
DRAWING = f"{Path(__file__).parent / 'models' / 'drawing.py'}:build"
UNEVEN = {"model": MODEL, "partition": {"dirichlet": {"alpha": 5}}}
REPLACING = {
    **UNEVEN,
    "model": {
        f"{Path(__file__).parent / 'models' / 'replacing.py'}:build": {"replaces": True}
    },
}


def launched(engine, runs, references, blobs, tmp_path, ranks=4):
    """Run all in one launch; the results by run."""
    if reason := available(engine):
        pytest.skip(reason)
    entries = [
        {
            "run": json.loads(run.model_dump_json()),
            "workers_per_node": PER_NODE,
            "reference": "",
            "apart": run.run_id.startswith(APART),
        }
        for run in runs
    ]
    for name in references:
        case = daso_case.reference(name)
        np.savez(tmp_path / f"initial-{name}.npz", initial=case["initial"])
        run = daso_case.reference_run(
            case,
            tmp_path / f"initial-{name}.npz",
            run_id=f"heat-{name}",
            execution="native",
            engine=engine,
        )
        entries.append(
            {
                **entries[0],
                "run": json.loads(run.model_dump_json()),
                "reference": name,
                "apart": False,
            }
        )
    (tmp_path / "runs.json").write_text(json.dumps(entries))
    np.savez(
        tmp_path / "data.npz",
        x=blobs.x_train,
        y=blobs.y_train,
        x_test=blobs.x_test,
        y_test=blobs.y_test,
    )
    command = [
        *launch_command(ranks)[0],
        sys.executable,
        "-W",
        "error",
        str(PROGRAM),
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        env=environment(1, oversubscribed=True),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        entry["run"]["run_id"]: arrays_in(tmp_path / f"{entry['run']['run_id']}.npz")
        for entry in entries
    }


def native_runs(engine, strategies, make_run, counts=(4,), **values):
    return [
        make_run(
            strategy,
            workers,
            run_id=f"{name}-{workers}",
            execution="native",
            engine=engine,
            epochs=3,
            batch_per_worker=4,
            warmup_steps=3,
            optimizer={"sgd": {"momentum": 0.9}},
            **values,
        )
        for name, strategy in strategies.items()
        for workers in counts
    ]


def compare(runs, found, blobs, machine):
    for run in runs:
        twin = run.model_copy(update={"engine": "virtual", "execution": "virtual"})
        outcome, weights = simulate(twin, blobs, machine)
        assert outcome.status == "completed", (run.run_id, outcome.error)
        native = found[run.run_id]
        np.testing.assert_allclose(
            native["final"],
            weights["final"].numpy(),
            atol=1e-10,
            rtol=0,
            err_msg=run.run_id,
        )
        counted = [(report.syncs, report.bytes_sent) for report in outcome.workers]
        assert native["counted"].tolist() == [list(pair) for pair in counted], (
            run.run_id
        )
        metrics = [
            evaluation.metric
            for evaluation in sorted(outcome.evaluations, key=lambda e: e.epoch)
        ]
        if len(native["metrics"]) == len(metrics):
            assert native["metrics"].tolist() == metrics, run.run_id


def runs_of_four(make_run):
    runs = native_runs("mpi", MPI, make_run) + native_runs(
        "mpi", WITH_POLICIES, make_run, **UNEVEN
    )
    runs += native_runs("mpi", ALL_APART, make_run, **REPLACING)
    runs += native_runs(
        "mpi",
        {"epoch_async-policies": {"epoch_async": POLICIES}},
        make_run,
        counts=(1,),
        **UNEVEN,
    )
    averaged = {"epoch_average-moving": {"epoch_average": {}}}
    for shuffle, values in MOVING.items():
        moving = native_runs("mpi", averaged, make_run, shuffle=shuffle, **values)
        runs += [run.model_copy(update={"run_id": f"{shuffle}-4"}) for run in moving]
    speed = {
        "partition": {"iid": {"balance": "speed"}},
        "virtual": {"slowdown": {1: 2.0}},
    }
    runs += native_runs("mpi", {"epoch_average-plain": {"epoch_average": {}}}, make_run)
    runs += native_runs(
        "mpi", {"epoch_average-grid": {"epoch_average": {}}}, make_run, blocks=[4, 2]
    )
    runs += native_runs(
        "mpi",
        {"epoch_average-speed": {"epoch_average": {"weighting": "samples"}}},
        make_run,
        **speed,
    )
    drawing = {
        "allreduce-drawing": {"allreduce": {}},
        "local_sgd-drawing": {"local_sgd": {"steps": 4}},
    }
    runs += native_runs("mpi", drawing, make_run, model=DRAWING)
    return runs


def runs_by_muon(make_run):
    strategies = {
        "local_sgd": MPI["local_sgd"],
        "epoch_average": {"epoch_average": {}},
        "allreduce": {"allreduce": {}},
    }
    muon = {"optimizer": Component(name="muon"), "lr": 0.02}
    return [
        run.model_copy(update=muon)
        for run in native_runs("mpi", strategies, make_run, counts=(2,))
    ]


@pytest.fixture(scope="module")
def by_mpi(make_run, blobs, tmp_path_factory):
    """Results of all runs on ranks of MPI, of one launch."""
    runs = runs_of_four(make_run) + runs_by_muon(make_run)
    return launched("mpi", runs, REFERENCES, blobs, tmp_path_factory.mktemp("mpi"))


def test_four_mpi_ranks_compute_what_virtual_workers_and_heat_do(
    make_run, blobs, machine, by_mpi
):
    """float64 to 1e-10, for sums in another order; heat's own weights, float32, to 1e-6."""
    runs, found = runs_of_four(make_run), by_mpi
    compare(runs, found, blobs, machine)
    for run in runs:
        calls, syncs = (
            found[run.run_id]["called"].tolist(),
            found[run.run_id]["counted"][:, 0].tolist(),
        )
        assert found[run.run_id]["recorded"].tolist() == calls, (
            f"{run.run_id}: the records count the calls of MPI"
        )
        if run.strategy.name in ("gossip", "noloco"):  # messages, until the last mean
            assert calls == [int(run.strategy.options.get("trailing") != "leave")] * 4
        # at the master three messages come and three go, each time
        elif run.run_id == "epoch_average-master-4":
            assert calls == [0] * 4
            assert (
                found[run.run_id]["messages"].tolist()
                == [6 * run.epochs] + [2 * run.epochs] * 3
            )
        elif run.run_id in (
            "rotate_blocks-4",
            "pairwise-4",
            "global-4",
        ):  # how many rows move, x, how many, y
            assert [call - sync for call, sync in zip(calls, syncs, strict=True)] == [
                4 * (run.epochs - 1)
            ] * 4
        elif run.run_id.startswith(APART):  # the buffer, the parameters, the momentum
            assert calls == [3 * sync for sync in syncs]
        else:
            assert calls == syncs, (
                f"{run.run_id}: one call of MPI for each synchronisation, whatever it carries"
            )
    for name in REFERENCES:
        case, native = daso_case.reference(name), found[f"heat-{name}"]
        assert native["skips"].tolist() == case["schedule"].tolist()
        np.testing.assert_allclose(native["final"], case["final"][0], atol=1e-6, rtol=0)
        for rank, losses in enumerate(native["losses"]):
            daso_case.check_epoch_losses(losses, case, rank)


def test_two_mpi_ranks_take_the_steps_of_muon_that_virtual_workers_take(
    make_run, blobs, machine, by_mpi
):
    """Bit for bit: sums of two have one order, and bfloat16, to which Muon rounds, one value of each."""
    runs, found = runs_by_muon(make_run), by_mpi
    assert runs
    compare(runs, found, blobs, machine)
    for run in runs:
        twin = run.model_copy(update={"engine": "virtual", "execution": "virtual"})
        _, weights = simulate(twin, blobs, machine)
        assert np.array_equal(found[run.run_id]["final"], weights["final"].numpy()), (
            run.run_id
        )
        assert (
            found[run.run_id]["called"].tolist()
            == found[run.run_id]["counted"][:, 0].tolist()
        )


@pytest.mark.thorough
def test_torch_itself_computes_what_ours_does_on_gloo_ranks(
    make_run, blobs, machine, tmp_path
):
    torchs = {
        name: strategy
        for name, strategy in GLOO.items()
        if name.startswith("torch") and "hier" not in name
    }
    runs = native_runs("gloo", GLOO, make_run) + native_runs(
        "gloo", ALL_APART, make_run, **REPLACING
    )
    runs += native_runs("gloo", torchs, make_run, counts=(2,))
    pair = {
        "torch_hierarchical_local_sgd": {
            "torch_hierarchical_local_sgd": {"groups": {2: 3}}
        }
    }
    runs += native_runs("gloo", pair, make_run, counts=(2,))
    runs += native_runs("gloo", DDP, make_run, counts=(2, 4))
    unused = {"ddp-unused": {"ddp": {"find_unused_parameters": True}}}
    finding = native_runs("gloo", unused, make_run, counts=(2, 4), model=DRAWING)
    wide = {"mlp": {"hidden": [16, 16]}}
    compressed = native_runs(
        "gloo", DDP_COMPRESSED, make_run, counts=(2, 4), model=wide
    )
    alone = native_runs("gloo", DDP_COMPRESSED, make_run, counts=(1,), model=wide)
    found = launched(
        "gloo", [*runs, *finding, *compressed, *alone], [], blobs, tmp_path
    )
    assert min(len(runs), len(finding), len(compressed), len(alone)) > 0
    compare([*runs, *finding, *alone], found, blobs, machine)
    # torch adds up who has gradients within its reducer, where the hook counts buckets
    # only
    for run in finding:
        recorded, called = (found[run.run_id][name] for name in ("recorded", "called"))
        assert recorded.tolist() == (2 * called).tolist(), run.run_id
    for run in compressed:
        twin = run.model_copy(update={"engine": "virtual", "execution": "virtual"})
        reports = simulate(twin, blobs, machine)[0].workers
        counted = [[report.syncs, report.bytes_sent] for report in reports]
        assert found[run.run_id]["counted"].tolist() == counted, run.run_id
        recorded, called = (
            found[run.run_id][name].tolist() for name in ("recorded", "called")
        )
        assert recorded == called, f"{run.run_id}: the records count the calls of torch"
        syncs = found[run.run_id]["counted"][:, 0]
        powersgd = (
            3 * (syncs + 2) // 2 - 2 * 2
        ).tolist()  # all steps but the first two are two synchronisations
        buckets = {
            "ddp-fp16": 5 * syncs,
            "ddp-bf16": syncs,
        }  # the last layer's bias and weights share one; all do
        assert recorded == (
            powersgd if "powersgd" in run.run_id else buckets[run.run_id[:-2]].tolist()
        ), run.run_id
    for run in runs:
        recorded, syncs = (
            found[run.run_id]["recorded"].tolist(),
            found[run.run_id]["counted"][:, 0].tolist(),
        )
        unknown = run.strategy.name == "torch_post_local_sgd"  # torch does not count
        expected = (
            [-1] * run.workers
            if unknown
            else [1] * 4
            if run.strategy.name in ("gossip", "noloco")  # messages, then one mean
            else syncs
        )
        expected = (
            [3 * sync for sync in syncs] if run.run_id.startswith(APART) else expected
        )
        if run.strategy.options.get("bucket_cap_mb"):  # one for each layer
            expected = [2 * sync for sync in syncs]
        if not unknown:
            assert recorded == found[run.run_id]["called"].tolist(), (
                f"{run.run_id}: the records count the calls of torch"
            )
        assert recorded == expected, run.run_id
