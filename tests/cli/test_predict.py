from __future__ import annotations

import csv
import re

import click
import pytest
import yaml
from click.testing import CliRunner

from scalebench.analysis.loading import load
from scalebench.cli.main import main
from scalebench.errors import UsageError
from tests.analysis.conftest import study  # noqa: F401
from tests.analysis.test_critical_batch import COUNTS, aimed, law
from tests.facts import together

BASE = ["predict", "resnet50", "--cluster", "juwels-booster"]


def invoke(*arguments: str):
    result = CliRunner().invoke(main, [*BASE, *arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def test_predict_prints_points_and_what_they_advise(tmp_path):
    table = tmp_path / "points.csv"
    result = invoke(
        "--step-time", "0.1", "--workers", "1,4,64", "--strategy", "allreduce", "--strategy", "local_sgd:steps=4",
        "--budget", "60", "--price", "2", "--epochs-to-target", "35,20000", "--csv", str(table),
    )  # fmt: skip
    assert "bound by compute" in result.output
    assert "Best for 60 GPU-hours" in result.output
    assert "To target" in result.output
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert {row["execution"] for row in rows} == {"modelled"}
    first, last = rows[0], rows[2]
    assert float(first["train_s"]) == pytest.approx(90 * 1281167 / 64 * 0.1, rel=1e-3)
    assert float(last["speedup"]) == pytest.approx(
        float(first["train_s"]) / float(last["train_s"]), rel=1e-3
    )
    assert float(last["time_to_target_s"]) == pytest.approx(
        35 * (1 + float(last["batch_global"]) / 20000) * float(last["epoch_s"])
    )


def test_figure_is_written_in_the_format_of_its_ending(tmp_path):
    picture = tmp_path / "points.svg"
    invoke("--step-time", "0.1", "--workers", "1,8", "--figure", str(picture))
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("option", "file"), [("--figure", "points.gif"), ("--csv", "file/points.csv")]
)
def test_output_that_cannot_be_written_is_refused_before_anything_is_predicted(
    tmp_path, option, file
):
    (tmp_path / "file").touch()
    with pytest.raises(click.BadParameter, match=file):
        invoke("--step-time", "0.1", option, str(tmp_path / file))


def test_bandwidth_that_is_needed_is_that_of_links_between_nodes():
    """By hand: 0.1 s computed, and a ring or tree whose time inside nodes stays; no link of a lone node is named."""
    output = invoke(
        "--step-time",
        "0.1",
        "--jitter",
        "0",
        "--workers",
        "4,1024",
        "--strategy",
        "allreduce",
    ).output
    needed = output.split("of a link between nodes: ")[1]
    found = [float(number) for number in re.findall(r"% ([\d.]+) Gbit/s", needed)]
    assert found == pytest.approx([4.21, 12.9, 41.5, 99.6], rel=0.01)
    alone = invoke(
        "--step-time", "0.1", "--workers", "1,4", "--strategy", "allreduce"
    ).output
    assert "of a link between nodes" not in alone


def test_batch_that_holds_efficiency_says_where_it_is_beyond_the_step_time():
    alone = invoke("--step-time", "0.001", "--workers", "64", "--batch", "1").output
    assert re.search(r"stated at batch 1, .*proportional", alone)


def test_law_of_gradient_averaging_marks_other_strategies():
    counts = ("--workers", "8,64", "--strategy", "ddp", "--strategy", "epoch_average")
    output = invoke(
        "--step-time",
        "0.05",
        *counts,
        "--epochs-to-target",
        "35,20000",
        "--budget",
        "300",
    ).output
    assert re.search(r"ddp at 64 workers .*least", output)
    assert "Best for 300 GPU-hours: ddp" in output
    assert "averaged in every batch" in output
    same = (
        "--strategy",
        "allreduce:compression=fp16",
        "--strategy",
        "allreduce:collective=tree",
        "--strategy",
        "bsp",
    )
    means = invoke(
        "--step-time", "0.05", "--workers", "8", *same, "--epochs-to-target", "35,20000"
    ).output
    assert "averaged in every batch" not in means
    alone = invoke(
        "--step-time",
        "0.05",
        *counts[:2],
        *counts[4:],
        "--epochs-to-target",
        "35,20000",
    ).output
    assert re.search(r"epoch_average at 64 workers .*least", alone), (
        "if there is no other"
    )


REFUSED = [  # at 60 workers with batches of 64
    ("adaptive:parameters_mib=1", r"least is \S+ MiB a worker, of which layer \S+"),
    ("pipeline:stages=60:micro_batches=64", "60 stages for a model of 18 layers"),
    ("pipeline:stages=8:micro_batches=8", "60 are no multiple of 8"),
    ("pipeline:stages=2:micro_batches=7", "7 micro-batches do not divide .* 64"),
    ("tensor:degree=3", "stem.conv cannot be shared by 3 workers.* its width 64"),
    ("hybrid:data=3:pipeline=2", "make 6 workers, not 60"),
]


@pytest.mark.parametrize(("strategy", "said"), REFUSED)
def test_options_that_suit_no_worker_count_are_an_error(strategy, said):
    alone = "--step-time", "0.1", "--workers", "60", "--strategy", strategy
    with pytest.raises(UsageError, match=f"^not predicted: .*at 60 workers: .*{said}"):
        invoke(*alone)


def test_heads_that_do_not_divide_are_refused_of_a_model_of_your_own(tmp_path):
    """Its attention makes queries, keys and values by one product."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def build(input_shape, outputs):\n"
        "    block = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)\n"
        "    head = nn.Linear(128, outputs)\n"
        "    return nn.Sequential(nn.Unflatten(1, (8, 16)), block, nn.Flatten(), head)\n"
    )
    own = [
        *("predict", f"{tmp_path}/net.py:build", "--input", "128", "--workers", "8"),
        *("--cluster", "juwels-booster", "--step-time", "0.1"),
    ]
    for degree in (4, 8):
        strategy = "--strategy", f"tensor:degree={degree}"
        result = CliRunner().invoke(main, [*own, *strategy], standalone_mode=False)
        said = str(result.exception or "")
        assert ("does not divide its number of heads 4" in said) == (degree == 8)


def test_strategy_that_is_refused_beside_others_has_a_line():
    both = "--strategy", "allreduce", "--strategy", "tensor:degree=3"
    result = invoke("--step-time", "0.1", "--workers", "60", *both)
    assert re.search(r"\nNot predicted: tensor\(degree=3\) at 60", result.output)
    assert not result.return_value


def test_counts_that_a_strategy_refuses_for_one_reason_share_a_line():
    output = invoke(
        "--step-time", "0.1", "--workers", "1..16", "--strategy", "daso-heat"
    ).output
    assert output.count("Not predicted") == 1
    assert "1, 2, 4 workers" in output


def test_strategies_that_are_refused_for_one_reason_share_a_line():
    batch = "--step-time", "0.1", "--batch-global", "64", "--workers", "32,128,256"
    names = [
        word for name in ("allreduce", "epoch_average") for word in ("--strategy", name)
    ]
    shared = invoke(*batch, *names).output
    assert shared.count("Not predicted") == 1
    assert (
        "allreduce, epoch_average at 128, 256 workers: a global batch of 64" in shared
    )
    pipeline = "--strategy", "pipeline:stages=2:micro_batches=2"
    apart = invoke(*batch, *names, *pipeline).output
    assert "allreduce, epoch_average at 128, 256 workers" in apart


def test_interval_that_holds_efficiency_is_not_longer_than_the_training():
    """Averaging every 128 epochs holds 80 % of anything in a training of 90 epochs, which it never averages in."""
    counts = ("--workers", "65536", "--strategy", "epoch_async")
    assert "no batch or interval" in invoke("--step-time", "0.025", *counts).output


def test_model_that_does_not_fit_says_what_would():
    output = invoke("--device", "v100-16gb", "--batch", "512", "--workers", "4").output
    assert "Does not fit" in output
    assert "batch" in output.split("Does not fit")[1]


def test_point_outside_the_inputs_range_is_marked():
    output = invoke("--step-time", "0.1", "--workers", "8192").output
    assert "8,192*" in output
    assert re.search(r"3,744 workers .*juwels-booster", output)


def test_epochs_to_target_are_fitted_to_a_study(study, tmp_path):  # noqa: F811
    """Each strategy with a law gets an interval; batches beyond the study's are told."""
    folder = study(
        rows=[aimed("allreduce", workers, law(workers)) for workers in COUNTS]
    ).folder
    table = tmp_path / "points.csv"
    asked = (
        "--step-time",
        "0.1",
        "--batch",
        "8",
        "--workers",
        "4,64",
        "--csv",
        str(table),
    )
    output = invoke(*asked, "--epochs-to-target", str(folder)).output
    assert "of allreduce: e0 (1 + B / b-crit)" in output
    assert "of epoch_average: not known" in output
    assert re.search(
        r"\* outside .*global batches of 8 to 128", " ".join(output.split())
    )
    with table.open() as file:
        near, far, other, _ = csv.DictReader(file)
    assert float(near["epochs_to_target"]) == pytest.approx(law(4), rel=0.05)
    assert (
        float(near["epochs_to_target_low"])
        <= float(near["epochs_to_target"])
        <= float(near["epochs_to_target_high"])
    )
    assert "global batches" in far["outside"]
    assert "global batches" not in near["outside"]
    assert other["time_to_target_s"] == ""


def test_epochs_to_target_are_fitted_to_a_file(tmp_path):
    (tmp_path / "mine.csv").write_text("batch_global,epochs\n64,11\n128,12\n256,14\n")
    output = invoke(
        "--step-time",
        "0.1",
        "--workers",
        "4",
        "--epochs-to-target",
        str(tmp_path / "mine.csv"),
    ).output
    assert "To target" in output
    assert re.search(
        rf"{tmp_path / 'mine.csv'} .*global batches of 64 to 256",
        output.replace("\n", " "),
    )


def test_step_time_is_scaled_to_another_device(tmp_path):
    """By the ratio of the rooflines of both; to the device itself by one."""

    def step_on(device):
        table = tmp_path / f"{device}.csv"
        invoke(
            "--step-time", "0.1", "--measured-on", "v100-16gb", "--device", device, "--workers", "1",
            "--strategy", "allreduce", "--csv", str(table),
        )  # fmt: skip
        with table.open() as file:
            (row,) = csv.DictReader(file)
        return float(row["step_s"])

    assert step_on("v100-16gb") == pytest.approx(0.1, rel=1e-3)
    assert 0.05 < step_on("a100-40gb") < 0.09


@pytest.mark.parametrize(
    "option",
    [
        "--memory",
        "--jitter",
        "--price",
        "--budget",
        "--input-rate",
        "--epoch-overhead",
        "--step-time",
    ],
)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_number_that_is_not_finite_is_refused(option, number):
    with pytest.raises((UsageError, click.UsageError)) as caught:
        invoke(
            *(() if option == "--step-time" else ("--step-time", "0.1")), option, number
        )
    assert caught.value.exit_code == 2


def test_advice_keeps_to_points_that_fit_inside_the_inputs_range():
    """Of 3,744 workers of the cluster, and of the law that was fitted."""
    output = invoke("--step-time", "0.1", "--workers", "1024,2048,16384", "--strategy", "allreduce", "--budget", "1e6",
                    "--epochs-to-target", "35,20000").output  # fmt: skip
    assert re.search(r"Decision: allreduce .*512 nodes \(2,048 workers\)", output)
    assert "knee" not in output, "2,048 workers are the most of those that are inside"
    assert re.search(r"1e\+06 GPU-hours: allreduce at 2,048 workers", output)
    assert "to the target for" in output
    assert re.search(r"at 2,048 workers .*least", output)


def test_device_of_the_cluster_is_taken_unless_another_is_said():
    words = ("--workers", "4", "--strategy", "allreduce")
    assert "a100-40gb" in invoke(*words).output
    assert invoke(*words).output == invoke(*words, "--device", "a100-40gb").output
    assert "v100-16gb" in invoke(*words, "--device", "v100-16gb").output
    with pytest.raises(UsageError, match="--step-time, or a --device"):
        invoke(*words, "--cluster", "ethernet-10g")


def test_all_of_the_answer_is_about_the_way_to_a_target():
    """Half of the epochs: half of every time and cost, links of other speed included."""

    def numbers(*aim: str) -> list[float]:
        words = (
            "--step-time",
            "0.1",
            "--workers",
            "256",
            "--strategy",
            "allreduce",
            "--epochs",
            "90",
            *aim,
        )
        head, choice, links = invoke(*words).output.splitlines()[:3]
        assert (
            "to the target" in head,
            "GPU-hours" in choice,
            "on links of" in links,
        ) == (bool(aim), True, True)
        assert ("to the target;" in choice) == bool(aim)
        hours, *_ = re.search(r"([\d.]+) GPU-hours", choice).groups()
        found = [
            re.search(r"allreduce ([\d.]+) (s|min)", head),
            *re.finditer(r"Gbit/s ([\d.]+) (s|min) \(", links),
        ]
        return [
            float(hours),
            *(float(each[1]) * (60 if each[2] == "min" else 1) for each in found),
        ]

    whole = numbers()
    assert len(whole) == 4
    assert numbers("--epochs-to-target", "45,1e15") == pytest.approx(
        [each / 2 for each in whole], rel=0.03
    )


def test_answer_stands_first_with_intervals_and_what_they_rest_on():
    both = ("--strategy", "ddp", "--strategy", "epoch_average")
    asked = ("--device", "a100-40gb", "--roofline", "--workers", "64,256", *both)
    answer, *_ = invoke(*asked, "--price", "2").output.splitlines()
    assert re.match(
        r"256 a100-40gb: epoch_average [\d.,]+ \w+ \([\d.,]+ to [\d.,]+\), ddp [\d.,]+ ",
        answer,
    )
    output = " ".join(invoke(*asked, "--price", "2").output.split())
    assert re.search(r"29 to 142 % .*roofline", output)
    assert re.search(r"Jitter of a step: 3 % \(assumed; --jitter 0", output)
    assert re.search(r"Epochs are taken as equal: .*epoch_average", output)
    assert re.search(r"200 Gbit/s: .*100 Gbit/s", output)
    assert "Jitter of a step" not in invoke(*asked, "--jitter", "0").output
    stated = invoke(*asked, "--epochs-to-target", "35,20000").output
    assert "Epochs are taken as equal" not in stated


def test_jitter_of_the_cluster_file_is_taken(tmp_path):
    from scalebench.cluster.cluster_file import load_cluster

    uneven = {"uneven": {"jitter": "normal", "jitter_sigma": 0.08}}
    file = tmp_path / "mine.yaml"
    described = (
        load_cluster("juwels-booster").model_dump(mode="json", exclude_unset=True)
        | uneven
    )
    file.write_text(yaml.safe_dump(described))
    output = invoke(
        "--cluster", str(file), "--step-time", "0.1", "--workers", "64"
    ).output
    assert re.search(r"Jitter of a step: 8 % \(.*juwels-booster; --jitter 0", output)


def test_published_step_is_preferred_to_the_roofline():
    """2,470 images/s by NVIDIA's PyTorch example, and no published one in float32."""
    asked = (
        "--device",
        "a100-80gb",
        "--batch",
        "256",
        "--workers",
        "1",
        "--strategy",
        "allreduce",
    )
    mixed = invoke(*asked, "--dtype", "bf16-mixed").output
    assert re.search(
        r"published: 2,470 samples/s .*a100-80gb .*bf16-mixed .*256", mixed
    )
    assert "104 ms" in mixed
    assert re.search(r"roofline .*a100-80gb in float32", invoke(*asked).output)
    for dtype, products in (("bf16-mixed", "bfloat16"), ("tf32", "tf32")):
        modelled = invoke(*asked, "--dtype", dtype, "--roofline").output
        assert re.search(
            rf"roofline .*a100-80gb in {products} .*float32 parameters", modelled
        )


def test_horovod_of_short_steps_is_bound_by_its_cycle(tmp_path):
    layers = tmp_path / "toy.csv"
    layers.write_text("name,parameters,flops,activations\na,1000,2000000,1000\n")
    asked = [
        "predict",
        "--layers",
        str(layers),
        "--cluster",
        "this-machine",
        "--step-time",
        "0.0005",
    ]
    asked += [
        "--samples",
        "1797",
        "--epochs",
        "5",
        "--workers",
        "2",
        "--strategy",
        "horovod",
    ]
    output = (
        CliRunner()
        .invoke(main, asked, standalone_mode=False, catch_exceptions=False)
        .output
    )
    assert re.search(r"2 workers .*Horovod cycle", output)


@pytest.mark.parametrize("varied", [(), ("--vary", "latency=1x,2x")])
def test_what_takes_most_of_the_time_binds(varied):
    """On a slow network Horovod at 2 workers waits for it; averages of 4 steps take 56 % in several small parts."""
    slow = (
        "--cluster",
        "ethernet-10g",
        "--step-time",
        "0.005",
        "--workers",
        "2",
        "--strategy",
        "horovod",
        *varied,
    )
    often = (
        "--cluster",
        "this-machine",
        "--step-time",
        "0.003",
        "--workers",
        "2",
        "--jitter",
        "0",
        "--epochs",
        "1",
        "--samples",
        "12800",
    )
    for asked in (slow, (*often, "--strategy", "local_sgd:steps=4", *varied)):
        output = invoke(*asked).output
        assert re.search(
            r"bound by network bandwidth|\d %  +network bandwidth\n", output
        ), output
        assert "bound by compute" not in output


@pytest.mark.parametrize("varied", [(), ("--vary", "latency=1x,2x")])
def test_a_nearly_hidden_network_does_not_bind(varied):
    """17 % of the time are exposed: half of the bandwidth's time takes off 13 %, half of compute's alone 13 %, with
    memory's 18 %."""
    asked = (
        "--cluster",
        "ethernet-10g",
        "--device",
        "a100-40gb",
        "--roofline",
        "--batch",
        "128",
    )
    output = invoke(*asked, "--workers", "64", "--strategy", "ddp", *varied).output
    assert "bound by compute" in output or "  compute\n" in output
    assert "bound by network" not in output


def test_strategies_with_components_of_their_own_are_predicted_beside_others():
    """Only Horovod has a cycle; at one worker nothing reacts to it."""
    asked = (
        "--step-time",
        "0.1",
        "--workers",
        "1",
        "--strategy",
        "allreduce",
        "--strategy",
        "horovod",
    )
    assert "Nothing here reacts to" in invoke(*asked).output


def test_needed_batch_fits_the_device():
    asked = [
        "predict",
        "vgg16",
        "--cluster",
        "ethernet-10g",
        "--device",
        "v100-16gb",
        "--batch",
        "32",
        "--workers",
        "64",
    ]
    output = (
        CliRunner()
        .invoke(main, [*asked, "--strategy", "allreduce"], standalone_mode=False)
        .output
    )
    assert re.search(r"80 % .*64 workers: accumulate=", output), (
        "a batch of 1,024 needs 73 GiB"
    )


def test_hours_are_those_of_the_device(tmp_path):
    """A cluster file without GPUs may be given a GPU, or another processor."""
    for device, unit in (("v100-16gb", "GPU-hours"), ("xeon-8160", "core-hours")):
        table = tmp_path / f"{device}.csv"
        asked = [
            "predict",
            "resnet50",
            "--cluster",
            "ethernet-10g",
            "--device",
            device,
            "--workers",
            "2",
        ]
        output = (
            CliRunner()
            .invoke(main, [*asked, "--csv", str(table)], standalone_mode=False)
            .output
        )
        assert unit in output
        with table.open() as file:
            assert bool(next(csv.DictReader(file))["cost_gpu_hours"]) == (
                unit == "GPU-hours"
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "ethernet-10g"], "--step-time"),
        (["--step-time", "0.1", "--device", "v100-16gb"], "one of them"),
        (["--step-time", "0"], "greater than 0"),
        (["--step-time", "0.1", "--batch", "0"], "'--batch': 0 is not in the range"),
        (["--step-time", "0.1", "--batch", "8", "--batch-global", "8"], "not both"),
        (["--step-time", "0.1", "--strategy", "alreduce"], "allreduce"),
        (["--step-time", "0.1", "--strategy", "local_sgd:step=4"], "steps"),
        (["--step-time", "0.1", "--workers", "4..1"], "--workers"),
        (["--step-time", "0.1", "--budget", "-1"], "--budget"),
        (
            ["--step-time", "0.1", "--epochs-to-target", "35"],
            "expected E0,B_CRIT, a study or a file.csv",
        ),
        (
            ["--step-time", "0.1", "--epochs-to-target", "35,twenty"],
            "expected E0,B_CRIT, a study or a file.csv",
        ),
        (["--step-time", "1e308"], "below 1e9"),
        (["--step-time", "0.1", "--jitter", "1e300"], "--jitter"),
        (["--step-time", "0.1", "--layers", "mine.csv"], "MODEL or --layers"),
        (["--step-time", "0.1", "--input", "3x0x32"], "3x224x224"),
        (
            ["--step-time", "0.1", "--epochs-to-target", "0,20000"],
            "epochs at batch 0 is 0; expected a number greater",
        ),
        (["--device", "a100-40gb", "--measured-on", "v100-16gb"], "--measured-on"),
        (["--step-time", "0.1", "--input-rate", "0"], "--input-rate"),
        (["--step-time", "0.1", "--collective", "rign"], "ring"),
        (["--device", "a100-40g"], "a100-40gb"),
        (
            ["--step-time", "0.1", "--engine", "tasks"],
            "strategy allreduce cannot run on engine tasks, which has no bat",
        ),
        (
            ["--step-time", "0.1", "--engine", "mpi", "--strategy", "horovod"],
            "use --engine horovod, or leave --engine",
        ),
        (
            ["--step-time", "0.1", "--backend", "dask"],
            "--backend: says where --engine tasks computes",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    with pytest.raises((UsageError, click.UsageError)) as caught:
        invoke(*arguments)
    said = (
        caught.value.format_message()
        if isinstance(caught.value, click.UsageError)
        else str(caught.value)
    )
    assert message in said
    assert "\n" not in said
    assert caught.value.exit_code == 2


def study_rows(folder, engine: str, backend: str) -> dict[tuple[str, int], float]:
    """Training times of a modelled study whose virtual runs are charged as on `engine`."""
    written = {
        "name": "priced",
        "dataset": {"synthetic": {"n_train": 4096, "n_test": 16}},
        "model": {"layers": {"table": "resnet50"}},
        "workers": [1, 8],
        "strategies": ["epoch_average", "epoch_async"],
        "epochs": 6,
        "repetitions": 1,
        "batch_per_worker": 16,
        "execution": "modelled",
        "cluster": "juwels-booster",
        "device_step_time": 0.01,
        "virtual": {"engine": engine, "jitter": "none"},
        "tasks": {"backend": backend},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(written))
    words = ["run", str(folder / "study.yaml"), "--output", str(folder)]
    assert CliRunner().invoke(main, words, standalone_mode=False).exception is None
    runs = load(folder / "priced").runs
    return {(row.strategy, row.workers): row.train_s for row in runs.itertuples()}


@pytest.mark.parametrize(
    ("engine", "backend"), [("tasks", "processes"), ("tasks", "dask"), ("mpi", "")]
)
def test_engine_charges_as_in_the_modelled_rows_of_a_study(tmp_path, engine, backend):
    table = tmp_path / "points.csv"
    said = invoke(
        "--step-time", "0.01", "--step-batch", "16", "--batch", "16", "--samples", "4096", "--epochs", "6",
        "--workers", "1,8", "--strategy", "epoch_average", "--strategy", "epoch_async", "--jitter", "0",
        "--engine", engine, *(["--backend", backend] if backend else []), "--csv", str(table),
    ).output  # fmt: skip
    source = f"typical of {backend}" if backend else "links of juwels-booster alone"
    assert f"Engine: {engine} ({source}" in said
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["engine"] for row in rows} == {engine}
    assert all(row["engine_source"].startswith(source) for row in rows)
    found = {
        (row["strategy"], int(row["workers"])): float(row["train_s"]) for row in rows
    }
    of_study = study_rows(tmp_path, engine, backend or "processes")
    assert found == pytest.approx(of_study, rel=1e-9)
    # its results in the place of MODEL state all that, epochs included
    results, again = tmp_path / "priced", tmp_path / "again.csv"
    words = ["predict", str(results / "runs.csv"), "--workers", "1,8"]
    CliRunner().invoke(
        main,
        [*words, "--csv", str(again)],
        standalone_mode=False,
        catch_exceptions=False,
    )
    with again.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["engine"] for row in rows} == {engine}
    assert {
        (row["strategy"], int(row["workers"])): float(row["train_s"]) for row in rows
    } == pytest.approx(of_study, rel=1e-9)


def test_backend_of_tasks_tells_in_the_answer_of_varied_numbers():
    words = (
        "--step-time",
        "0.1",
        "--strategy",
        "epoch_average",
        "--vary",
        "network-bandwidth=100,200",
    )
    assert together(
        invoke(*words, "--engine", "tasks", "--backend", "ray").output,
        "Engine: tasks",
        "typical of ray",
        "3.2 ms",
    )
    assert "Engine:" not in invoke(*words).output


def test_a_device_has_no_price_for_the_steps_of_muon():
    with pytest.raises(UsageError, match=r"muon.* matrices .*state the seconds"):
        invoke("--device", "a100-40gb", "--optimizer", "muon")


def test_files_of_a_study_are_found_from_any_folder(tmp_path, monkeypatch):
    """Model and strategy lie beside the study; its results are named from elsewhere."""
    begun = tmp_path / "begun"
    for folder in (begun / "own", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    (begun / "own" / "net.py").write_text(
        "from torch import nn\n"
        "def build(input_shape, outputs):\n"
        "    return nn.Linear(input_shape[0], outputs)\n"
    )
    (begun / "own" / "lazy.py").write_text(
        "from scalebench.strategies.epoch_average import EpochAverage\n"
        "class Lazy(EpochAverage):\n"
        "    name, summary, source = 'lazy', 'as epoch_average', 'an example'\n"
    )
    monkeypatch.chdir(begun)
    written = {
        "name": "mine",
        "dataset": "wine",
        "model": "own/net.py:build",
        "strategies": ["allreduce", "own/lazy.py:Lazy"],
        "workers": [1, 2],
        "epochs": 1,
        "repetitions": 1,
        "execution": "modelled",
        "device_step_time": 0.01,
    }
    (begun / "mine.yaml").write_text(yaml.safe_dump(written))
    command = {"standalone_mode": False, "catch_exceptions": False}
    CliRunner().invoke(main, ["run", "mine.yaml"], **command)
    predict = ["predict", "--workers", "1,2"]
    here = CliRunner().invoke(main, [*predict, "results/mine"], **command).output
    monkeypatch.chdir(tmp_path / "elsewhere")
    results = "../begun/results/mine"
    there = CliRunner().invoke(main, [*predict, results], **command).output
    assert "own/lazy.py:Lazy" in here
    assert there.replace("../begun/own", "own") == here
