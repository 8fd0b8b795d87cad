"""A study file, `--set` and flags become one validated study; invalid input is a one-line error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scalebench.errors import StudyError
from scalebench.study.load import dump_study, load_study, separated, study_schema
from scalebench.study.spec import DEFAULT_TARGET, Study
from tests.facts import together


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "study.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(
    path: Path | None,
    overrides: dict[str, Any] | None = None,
    sets: list[str] | None = None,
) -> str:
    with pytest.raises(StudyError) as caught:
        load_study(path, overrides or {}, sets or [])
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_file_is_the_default_study() -> None:
    assert load_study(None, {}, []) == Study(target_metric=DEFAULT_TARGET)


def test_target_of_the_default_study_belongs_to_its_data() -> None:
    assert load_study(None, {"dataset": "diabetes"}, []).target_metric is None
    assert load_study(None, {}, ["target_metric=null"]).target_metric is None
    assert load_study(None, {"epochs": 2}, ["target_metric=0.95"]).target_metric == 0.95


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"scaling": "strong"}, "digits-strong-scaling"),
        ({"dataset": "wine"}, "wine-strong-scaling"),
        (
            {
                "dataset": {"csv": {"file": "cells.csv", "target": "kind"}},
                "scaling": "weak",
            },
            "cells-weak-scaling",
        ),
        ({"dataset": "own/data.py:load"}, "data-strong-scaling"),
        ({"dataset": "own/_data.py:load"}, "data-strong-scaling"),
        ({"dataset": "wine", "name": "mine"}, "mine"),
    ],
)
def test_study_without_a_name_has_that_of_its_data(
    tmp_path: Path, said: dict[str, Any], name: str
) -> None:
    assert load_study(None, said, []).name == name
    assert load_study(write(tmp_path, yaml.safe_dump(said)), {}, []).name == name


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}\n", "null\n"])
def test_empty_study_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        StudyError, match=r"study.yaml: says nothing; expected keys of a study, such as"
    ):
        load_study(write(tmp_path, text), {}, ["epochs=2"])


def test_flags_override_set_and_set_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "epochs: 2\nlr: 0.5\nworkers: 1,2\nseed: 3\n")
    study = load_study(path, {"epochs": 9, "lr": None}, ["epochs=4", "lr=0.25"])
    assert (study.epochs, study.lr, study.workers, study.seed) == (9, 0.25, [1, 2], 3)


def test_set_gives_options_of_the_component_of_a_flag() -> None:
    study = load_study(
        None,
        {"model": "mlp", "dataset": "csv"},
        ["model.hidden=[8]", "dataset.file=mine.csv"],
    )
    assert study.model.options == {"hidden": [8]}
    assert (study.dataset.name, study.dataset.options) == ("csv", {"file": "mine.csv"})
    with pytest.raises(StudyError, match=r"strategies.0.steps"):
        load_study(None, {"strategies": ["local_sgd"]}, ["strategies.0.steps=64"])


def test_flag_accepts_a_component_with_options() -> None:
    flags = {
        "strategies": ["serial", "local_sgd: {steps: 64}", "{name: slowmo, steps: 2}"],
        "model": "mlp: {hidden: [8]}",
    }
    study = load_study(None, flags, [])
    assert [str(strategy) for strategy in study.strategies] == [
        "serial",
        "local_sgd(steps=64)",
        "slowmo(steps=2)",
    ]
    assert study.model.options == {"hidden": [8]}
    assert (
        load_study(None, {"model": "folder/own.py:factory"}, []).model.name
        == "folder/own.py:factory"
    )
    assert together(
        refusal(None, {"strategies": ["local_sgd: steps: 8"]}),
        "--strategy",
        "'local_sgd: steps: 8'",
        "line 1",
    )


def test_strategies_are_separated_by_commas_outside_brackets() -> None:
    texts = [
        "serial, local_sgd:steps=64",
        "pipeline:balance=[1,2]:stages=2",
        "{name: slowmo, steps: 2}",
        "pipeline(stages=2, schedule=gpipe),asp",
    ]
    assert separated(texts) == [
        "serial",
        "local_sgd:steps=64",
        "pipeline:balance=[1,2]:stages=2",
        "{name: slowmo, steps: 2}",
        "pipeline(stages=2, schedule=gpipe)",
        "asp",
    ]


@pytest.mark.parametrize("repetitions", [3, 7])
def test_flag_replaces_the_exclusive_key_of_the_file(
    tmp_path: Path, repetitions: int
) -> None:
    until = ["until.ci_width=5%"]
    assert "give repetitions or until, not both" in refusal(
        None, {"repetitions": repetitions}, until
    )
    path = write(tmp_path, f"repetitions: {repetitions}\n")
    assert load_study(path, {}, until).repetitions == 3
    path = write(tmp_path, "until: {ci_width: 5%}\n")
    assert load_study(path, {"repetitions": repetitions}, []).until is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "lr_policy=cosine,lr_warmup_epochs=2",
            "lr_warmup_epochs has no effect with lr_policy cosine",
        ),
        ("lr_decay_every=2", "lr_decay_every has no effect with lr_policy constant"),
        (
            "workers=4,virtual.slowdown={9: 2.0}",
            "virtual.slowdown names worker 9; the largest run has the workers 0 to 3",
        ),
        ("workers=4,virtual.slowdown={-1: 2.0}", "slowdown.-1"),
        (
            "workers=2,virtual.slow_windows=[{rank: 2; until_s: 1; factor: 2}]",
            "virtual.slow_windows names worker 2",
        ),
    ],
)
def test_keys_without_effect_are_refused(said: str, message: str) -> None:
    with pytest.raises(StudyError, match=re.escape(message)):
        load_study(None, {}, [item.replace(";", ",") for item in said.split(",")])


def test_set_changes_nested_keys_and_reads_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {mlp: {hidden: [64], activation: relu}}\n")
    study = load_study(
        path,
        {},
        [
            "model.hidden=[32, 16]",
            "virtual.ties=rank",
            "virtual.slowdown={3: 2.0}",
            "lr=1e-3",
        ],
    )
    assert study.model.options == {"hidden": [32, 16], "activation": "relu"}
    assert (study.virtual.ties, study.virtual.slowdown, study.lr) == (
        "rank",
        {3: 2.0},
        1e-3,
    )


def test_set_changes_an_option_of_the_default_model() -> None:
    study = load_study(None, {}, ["model.hidden=[8]", "optimizer.momentum=0"])
    assert (study.model.name, study.model.options, study.optimizer.options) == (
        "mlp",
        {"hidden": [8]},
        {"momentum": 0},
    )


@pytest.mark.parametrize("sets", [[], ["batch_global=64"]])
def test_a_batch_flag_replaces_the_files_other_batch_key(
    tmp_path: Path, sets: list[str]
) -> None:
    path = write(tmp_path, "batch_per_worker: 8\n")
    study = load_study(path, {} if sets else {"batch_global": 64}, sets)
    assert (study.batch_global, study.batch_per_worker) == (64, None)


def test_both_batch_keys_are_refused(tmp_path: Path) -> None:
    assert together(
        refusal(write(tmp_path, "batch_per_worker: 8\nbatch_global: 64\n")),
        "batch_per_worker",
        "batch_global",
        "not both",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epoch: 3", "unknown key 'epoch'; did you mean 'epochs'?"),
        (
            "epohs: 3\ndatset: wine",
            "unknown key 'epohs'; did you mean 'epochs'? (also unknown: 'datset')",
        ),
        ("str: 3", "unknown key 'str'; did you mean 'cluster'"),
        ("virtual: {int: 3}", "unknown key 'virtual.int'"),
        ("virtual: {tie: rank}", "unknown key 'virtual.tie'; did you mean 'ties'?"),
        ("epochs: three", "key 'epochs': expected an integer"),
        (
            "seed: 99999999999999999999999",
            "key 'seed': expected a number less than or equal to 4294967295",
        ),
        (
            "name: .hidden",
            "a name has letters, digits, . _ -, at most 80, and begins with a letter or digit",
        ),
        ("strategies: []", "key 'strategies': expected at least 1 item, got []"),
        (
            "workers: 99999999999999999999",
            "worker counts lie between 1 and 1,000,000, got '99999999999999999999'",
        ),
        ("epochs: 0", "key 'epochs': expected a number greater than 0, got 0"),
        ("workers: 64..1", "the range '64..1' runs backwards; write 1..64"),
        ("workers: 1..", "cannot read the worker counts '1..'"),
        ("workers: 0", "worker counts lie between 1 and"),
        ("scaling: strng", "key 'scaling': expected 'strong' or 'weak', got 'strng'"),
        (
            "blocks: many",
            "key 'blocks': expected an integer or a list or 'auto', got 'many'",
        ),
        ("blocks: [4, 0]", "key 'blocks"),
        ("blocks: [2, 2, 2]", "key 'blocks"),
        ("strategies: []", "key 'strategies'"),
        ("strategies: [{a: 1, b: 2}]", "expected a name, {name: {option: value}}"),
        ("name: ../../etc", "key 'name'"),
        ("- a\n- b", "expected a mapping of keys to values, got ['a', 'b']"),
        ("just words", "expected a mapping of keys to values, got 'just words'"),
        ("1: 2", "expected keys that are words, got 1"),
        (
            "epochs: 3\nepochs: 4",
            "line 2, column 1: not YAML: the key 'epochs' stands twice",
        ),
        (
            "virtual:\n\tties: rank",
            "line 2, column 1: not YAML: a tab stands where spaces",
        ),
        ("name: !!python/object/apply:os.system [true]", "line 1, column 7: the tag"),
        ("name: !custom x", "the tag '!custom' is not allowed"),
        ("a: &a [1]\nb: *a", "line 1, column 4: anchors and aliases are not supported"),
        ("a: [1, 2", "not YAML: "),
        ("a: b: c", "line 1, column 5: not YAML"),
        ("lr: 2001-99-99", "not YAML: month"),
        ("a: " + "[" * 60 + "]" * 60, "nested deeper than 40 levels"),
        ("seed: 1" + "0" * 5000, "not YAML: Exceeds the limit"),
        (b"\xff\xfe\x00\x00", "not text in UTF-8"),
        (b"\x00\x01binary", "not YAML"),
        ("a: " + "x" * 1_000_001, "larger than 1,000,000 bytes"),
    ],
    ids=range(37),
)
def test_invalid_file_is_refused_by_key(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = write(tmp_path, content)
    text = refusal(path)
    assert message in text
    assert text.count(str(path)) == 1


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("epochs", "--set epochs: expected KEY=VALUE"),
        ("=3", "--set =3: expected KEY=VALUE"),
        ("epcohs=3", "unknown key 'epcohs'; did you mean 'epochs'?"),
        ("epochs=[", "--set epochs, line 2, column 1: not YAML"),
        ("epochs=0", "--set epochs=0: key 'epochs': expected a number greater than 0"),
        ("virtual.tie=rank", "unknown key 'virtual.tie'; did you mean 'ties'?"),
        ("name.x.y=1", "--set name.x.y=1"),
    ],
)
def test_invalid_set_is_refused_by_key(item: str, message: str) -> None:
    assert message in refusal(None, sets=[item])


def test_files_of_a_study_lie_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "study", tmp_path / "here"
    for place in (folder, here):
        place.mkdir()
        (place / "net.py").touch()
        (place / "my.csv").touch()
    (here / "machine.yaml").touch()
    monkeypatch.chdir(here)
    path = write(
        folder,
        "model: {net.py:Net: {width: 3}}\ndataset: my.csv\ncluster: machine.yaml\nstrategies: [net.py:Mine, ddp]",
    )
    study = load_study(path, {}, [])
    assert study.model.name == f"{folder}/net.py:Net"
    assert str(study.strategies[0]) == f"{folder}/net.py:Mine"
    assert study.cluster == "machine.yaml", "of the current folder, as none is beside"
    assert (study.dataset.name, study.dataset.options) == ("csv", {"file": "my.csv"})
    assert study.data_dir == folder
    # on the command line paths begin in the current folder
    flags = {"dataset": "my.csv", "model": "net.py:Net"}
    study = load_study(path, flags, [])
    assert (study.model.name, study.data_dir) == ("net.py:Net", Path())
    # as do those of a resolved study, which go on where it began
    study = load_study(write(folder, dump_study(study)), {}, [])
    assert (study.model.name, study.data_dir) == ("net.py:Net", Path())
    study = load_study(None, {"dataset": "d/x.npz", "data_dir": Path("e")}, [])
    assert study.data_dir == Path("e")
    assert study.dataset.options == {"file": "d/x.npz"}


def test_invalid_flag_is_named_in_the_error() -> None:
    assert refusal(None, {"batch_per_worker": 0}).startswith(
        "--batch-per-worker: expected a number greater than 0"
    )


@pytest.mark.parametrize("path", ["missing.yaml", "."])
def test_unreadable_file_is_refused(tmp_path: Path, path: str) -> None:
    assert "cannot read the study file" in refusal(tmp_path / path)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"batch_global": 128, "workers": "1..64:8", "target_metric": 0.9},
        {
            "strategies": ["allreduce", {"epoch_average": {"every": 2}}],
            "description": "naïve: #1\n- no",
        },
        {
            "virtual": {"slowdown": {0: 1.5}},
            "data_dir": "data",
            "device_step_time": 1e-7,
            "name": "2024.1",
        },
    ],
)
def test_dumped_study_loads_equal(tmp_path: Path, overrides: dict[str, Any]) -> None:
    study = load_study(None, overrides, [])
    assert load_study(write(tmp_path, dump_study(study)), {}, []) == study
    assert dump_study(study).startswith("# A scalebench study")


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("/scratch/dora/net/start.npz", "/scratch/$USER/net/start.npz"),
        ("/home/dora/of/dora/start.npz", "~/of/$USER/start.npz"),
        (
            "/scratch/dora",
            "/scratch/dora",
        ),  # a file's own name is not a person's folder
        ("/scratch/doras/start.npz", "/scratch/doras/start.npz"),
        ("dora/start.npz", "$USER/start.npz"),
    ],
)
def test_dumped_paths_hide_the_user_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, written: str
) -> None:
    monkeypatch.setenv("HOME", "/home/dora")
    monkeypatch.setenv("LOGNAME", "dora")
    study = load_study(None, {"init_weights": path, "model": f"{path}:build"}, [])
    kept = write(tmp_path, dump_study(study))
    assert yaml.safe_load(kept.read_text())["init_weights"] == written
    assert yaml.safe_load(kept.read_text())["model"] == f"{written}:build"
    assert load_study(kept, {}, []) == study
    monkeypatch.setenv("LOGNAME", "emil")
    assert str(load_study(kept, {}, []).init_weights) == written.replace(
        "$USER", "emil"
    ).replace("~", "/home/dora")


def test_the_schema_names_every_key() -> None:
    schema = study_schema()
    assert set(schema["properties"]) == set(Study.model_fields)
    assert schema["additionalProperties"] is False


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=6)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)
    ),
)
keys = st.sampled_from(sorted(Study.model_fields)) | st.text(max_size=8)


@given(st.dictionaries(keys, trees, max_size=4))
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
def test_any_values_give_a_study_or_a_one_line_error(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    check(write(tmp_path, yaml.safe_dump(values)))


@given(
    st.binary(max_size=200)
    | st.text(alphabet="ab:-[]{}&*!|>%@`#'\"\t\n 0.,?~=<", max_size=60).map(str.encode)
)
@example(b"? [a]\n: b")
@example(b"<<: {a: 1}")
@example(b"{}: 1")
@example(b"=: 1")
@example(b"workers: 0x_")
@example(b"seed: 190:20:30")
@example(b"%YAML 9.9\n---\na: 1")
@example(b"a: 1\n---\nb: 2")
@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
def test_any_bytes_give_a_study_or_a_one_line_error(
    tmp_path: Path, content: bytes
) -> None:
    check(write(tmp_path, content))


def check(path: Path) -> None:
    try:
        load_study(path, {}, [])
    except StudyError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are good, the message only in one
        assert "study.yaml" in str(error)  # noqa: PT017
