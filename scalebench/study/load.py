"""Loading of a study from a YAML file, `--set` and flags, and writing it back to YAML."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from scalebench.errors import StudyError, nearest
from scalebench.study.spec import DEFAULT_TARGET, Component, Study, Training, slug
from scalebench.study.validation import explain, parse, read_mapping

_HEADER = """\
# A scalebench study, resolved: every key with the value that was used; `virtual` holds the options of the study, and
# the jitter and slow workers of the cluster apply where it has none.
# `scalebench run THIS_FILE` runs it again; `scalebench schema` explains each key.
"""
_USER = "$USER"
_FILE = re.compile(r"\.(?:ya?ml|py|npz|csv|json)(?::\w+)?$")  # that a study names
_TABLES = (".csv", ".npz")  # files that are a data set
_NAMING_FILES = {
    "dataset",
    "model",
    "strategies",
    "cluster",
    "init_weights",
    "calibration",
}
_EXCLUDE_EACH_OTHER = (("batch_per_worker", "batch_global"), ("repetitions", "until"))
_PINS = {
    "dataset": "dataset_sha256",
    "data_dir": "dataset_sha256",
    "model": "model_sha256",
    "init_weights": "init_weights_sha256",
    "cluster": "cluster_sha256",
    "strategies": "strategy_sha256",
}
_SEPARATOR = re.compile(r",(?![^(\[]*[)\]])")  # not inside NAME(A=1, B=2) or [1, 2]
_BEFORE_OPTION = re.compile(r":(?=\s*[A-Za-z_]\w*\s*=)")
# components whose options `--set model.hidden=...` reach
_SHORTCUTS = (
    "dataset",
    "model",
    "optimizer",
    "partition",
)


def load_study(
    path: Path | None,
    overrides: dict[str, Any],
    sets: list[str],
    begun_in: Path | None = None,
) -> Study:
    """Return the study in `path` (None: the default study), changed by `sets` (`key=value`), then `overrides` (flags).

    The default study has a target metric as long as its data set is the default one. A
    study without a name has that of its data and scaling.

    A flag is applied first if `sets` give options of the component it names. The value
    of a component's flag is a name or the YAML of a file, `--strategy 'local_sgd:
    {steps: 8}'`, or NAME:OPTION=VALUE.

    A resolved study names files as from the folder in which it began; they are found
    from another one if that is `begun_in`.

    Raises:
        StudyError: one line that names the file or flag, the key, what was expected and the nearest known key.
    """
    raw = _read(path, begun_in) if path else {}
    if path and not raw:
        raise StudyError(
            f"{path}: says nothing; expected keys of a study, such as `workers: 1..4` (scalebench schema)"
        )
    where = str(path) if path else "the default study"
    flags = _flags(overrides, sets)
    # a file's batch_global beside a flag's batch_per_worker would be refused as a
    # contradiction
    raw = _without_replaced(raw, {*flags, *map(_set_key, sets)})
    completed = {_set_key(item) for item in sets if "." in item.partition("=")[0]}
    # --dataset csv --set dataset.file=my.csv
    raw |= {key: value for key, value in flags.items() if key in completed}
    for item in sets:
        _assign(raw, item)
    raw |= {key: value for key, value in flags.items() if key not in completed}
    raw = _with_data_dir(raw)
    # The target is an accuracy of the default data, and says nothing of others.
    if path is None and "dataset" not in raw:
        raw.setdefault("target_metric", DEFAULT_TARGET)
    try:
        study = Study.model_validate(from_home(raw))
    except ValidationError as error:
        raise StudyError(
            explain(error, Study, _origin(error, where, overrides, sets))
        ) from None
    return (
        study
        if "name" in raw
        else study.model_copy(update={"name": _name_by_content(study)})
    )


def _flags(overrides: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Return the flags that are given, components written out.

    Raises:
        StudyError: a flag that is no component, or strategies by a flag and by `sets`.
    """
    flags = {key: value for key, value in overrides.items() if value is not None}
    flags |= {
        key: written_component(flags[key], f"--{key}")
        for key in _SHORTCUTS
        if key in flags
    }
    flags = _with_data_dir(flags)
    if "strategies" in flags:
        if item := next(
            (item for item in sets if item.partition("=")[0].strip() == "strategies"),
            "",
        ):
            raise StudyError(
                f"--set {item}: --strategy gives strategies too; leave one of them out"
            )
        flags["strategies"] = [
            written_component(item, "--strategy") for item in flags["strategies"]
        ]
    return flags


def _read(path: Path, begun_in: Path | None) -> dict[str, Any]:
    """Return the keys of a study file, in which a file is the one beside it, else that of the current folder.

    In a resolved one it is that of the folder `begun_in`, in which its study began.
    """
    raw = read_mapping(path, StudyError, "study")
    folder = path.parent
    if path.read_text(encoding="utf-8-sig").startswith(_HEADER.splitlines()[0]):
        if begun_in is None or begun_in == Path.cwd():
            return raw
        folder = Path(os.path.relpath(begun_in))

    def beside(text: str) -> str:
        name = text.rpartition(":")[0] if ".py:" in text else text
        is_there = _FILE.search(text) is not None and (folder / name).is_file()
        return str(folder / text) if is_there else text

    # files of a data set lie in data_dir, where there is one
    named = _NAMING_FILES - ({"dataset"} if "data_dir" in raw else set())
    named |= {_PINS["strategies"]}  # by the strategies' names
    raw |= {key: _mapped(raw[key], beside) for key in named & raw.keys()}
    data_dir = raw.get("data_dir")
    if isinstance(data_dir, str) and (folder / data_dir).is_dir():
        raw["data_dir"] = str(folder / data_dir)
    return raw


def _with_data_dir(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with the folder of a data set that is a file as data_dir, unless they have one.

    `my.csv` is short for `{csv: {file: my.csv}}`.
    """
    written = raw.get("dataset")
    if isinstance(written, str) and (suffix := Path(written).suffix) in _TABLES:
        written = {suffix[1:]: {"file": written}}
    try:
        component = Component.model_validate(written)
    except ValidationError:  # refused with the key's name
        return dict(raw)
    file = component.options.get("file")
    if not isinstance(file, str):
        return dict(raw)
    found = {**raw, "dataset": written}
    if raw.get("data_dir") is None:
        path = Path(file)
        found["data_dir"] = str(path.parent)
        found["dataset"] = {component.name: {**component.options, "file": path.name}}
    return found


def _name_by_content(study: Study) -> str:
    """Return a name by data and scaling, so that studies of other data do not meet in one folder of results."""
    default = Study()
    if (study.dataset, study.scaling) == (default.dataset, default.scaling):
        return default.name
    data = str(study.dataset.options.get("file", study.dataset.name)).partition(":")[0]
    # a name begins with a letter or digit
    return slug(f"{Path(data).stem[:60]}-{study.scaling}-scaling").lstrip("_")


def dump_study(study: Study) -> str:
    """Return the study as YAML with a comment on top; `load_study` reads an equal study.

    The file contains no user name: paths in the user's home begin with ~/, and a folder
    named after the user is $USER. Read by the same user, they are the same paths.
    """
    values = study.model_dump(mode="json")
    # None is written by omission; at least one batch key is None.
    order = [*Study.__annotations__, *Training.model_fields]
    kept = {key: values[key] for key in order if values[key] is not None}
    # an empty mapping in every file would say nothing
    if not study.strategy_sha256:
        del kept["strategy_sha256"]
    # the cluster has the others
    kept["virtual"] = study.virtual.model_dump(mode="json", exclude_unset=True)
    if study.until is not None:
        del kept["repetitions"]
    for key in (*_SHORTCUTS, "strategies"):
        kept[key] = (
            [_plain(item) for item in kept[key]]
            if key == "strategies"
            else _plain(kept[key])
        )
    return _HEADER + yaml.safe_dump(
        to_home(kept), sort_keys=False, allow_unicode=True, width=100
    )


def study_schema() -> dict[str, Any]:
    """Return the JSON Schema of a study file."""
    schema = Study.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "scalebench study"
    written = {
        "description": "a name, {name: {option: value}} or {name: NAME, option: value}",
        "anyOf": [{"type": "string"}, {"type": "object", "minProperties": 1}],
    }
    schema["$defs"]["Component"] = written
    counts = schema["properties"]["workers"]
    schema["properties"]["workers"] = {
        "description": "1..64 (powers of two), 1..64:8 (1, 8, 16, ...), 1,2,6 or a list of counts",
        "anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}, counts],
    }
    return schema


def from_home(value: Any) -> Any:
    """Return `value` with ~/ and $USER in its paths replaced by the user's home and name."""

    def expanded(text: str) -> str:
        text = _renamed(text, _USER, _user() or _USER)
        return f"{Path.home()}/{text[2:]}" if text.startswith("~/") else text

    return _mapped(value, expanded)


def to_home(value: Any) -> Any:
    """Return `value` with the user's home and name in its paths replaced by ~/ and $USER."""
    home, user = f"{Path.home()}/", _user()

    def written(text: str) -> str:
        if text.startswith(home):
            text = f"~/{text[len(home) :]}"
        return _renamed(text, user, _USER) if user else text

    return _mapped(value, written)


def _renamed(text: str, name: str, other: str) -> str:
    """Return a path with `name` renamed to `other`, where it is a folder, or a word of the file's name.

    Only in texts that are paths: absolute ones, those in ~/, and names of files that a
    study names, as own.yaml.
    """
    is_path = text.startswith(("/", "~/"))
    # a user may be called as a strategy is
    if not is_path and not _FILE.search(text):
        return text
    *folders, last = text.split("/")
    last = re.sub(
        rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])(?=.*{_FILE.pattern})",
        lambda _: other,
        last,
    )
    return "/".join(
        [*(other if folder == name else folder for folder in folders), last]
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in some containers
        return ""


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {
            _mapped(key, change): _mapped(item, change) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _plain(component: dict[str, Any]) -> Any:
    return (
        {component["name"]: component["options"]}
        if component["options"]
        else component["name"]
    )


def separated(texts: Iterable[str]) -> list[str]:
    """Return the items of texts such as `asp,ssp:slack=2`; a text with braces is one item."""
    items: list[str] = []
    for text in texts:
        items += [text] if "{" in text else _SEPARATOR.split(text)
    return [item.strip() for item in items]


def written_component(value: Any, flag: str) -> Any:
    """Return a strategy, model, data set or optimizer given by `flag`: a mapping, or its name.

    Written as the YAML of a file, or as NAME:OPTION=VALUE:OPTION=VALUE, where NAME may
    be file.py:Class.
    """
    if not isinstance(value, str):
        return value
    name, *options = _BEFORE_OPTION.split(value) if "{" not in value else [value]
    if options:
        pairs = [option.partition("=") for option in options]
        where = f"{flag} {value!r}"
        return {
            name.strip(): {
                key.strip(): parse(text, where, StudyError) for key, _, text in pairs
            }
        }
    # file.py:Class has a colon, too
    if not re.search(r":\s|\{", value):
        return value
    parsed = parse(value, f"{flag} {value!r}", StudyError)
    return parsed if isinstance(parsed, dict) else value


def _assign(raw: dict[str, Any], item: str) -> None:
    """Write `a.b=value` into `raw`; the value is read as YAML."""
    key, equals, text = item.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise StudyError(
            f"--set {item}: expected KEY=VALUE, such as --set virtual.ties=rank"
        )
    if parts[0] not in Study.model_fields:
        raise StudyError(
            f"--set {item}: unknown key {parts[0]!r}; {nearest(parts[0], Study.model_fields)}"
        )
    value = parse(text, f"--set {key}", StudyError)
    if len(parts) == 2 and parts[0] in _SHORTCUTS:
        _assign_option(raw, parts[0], parts[1], value)
        return
    here = raw
    for part in parts[:-1]:
        inner = here.setdefault(part, {})
        if not isinstance(inner, dict):
            raise StudyError(
                f"--set {item}: {part!r} has no keys of its own, it is {inner!r}"
            )
        here = inner
    here[parts[-1]] = value


def _assign_option(raw: dict[str, Any], key: str, option: str, value: Any) -> None:
    """Change one option of a component, in any of its written forms: `--set model.hidden=[64]`."""
    field = Study.model_fields[key]
    kind: Any = field.annotation
    written = raw.get(key, field.get_default().model_dump())
    try:
        component = kind.model_validate(written).model_dump()
    except ValidationError as error:
        raise StudyError(explain(error, Study, f"key {key!r}")) from None
    if option == "name":
        component = {"name": value, "options": {}}
    else:
        component["options"][option] = value
    raw[key] = component


def _set_key(item: str) -> str:
    """Return the key of a study that `--set` changes: `model` of `model.hidden=[64]`."""
    return item.partition("=")[0].strip().partition(".")[0]


def _without_replaced(raw: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Return a file's keys without those that the `given` ones replace: the other of two, the checksum of a file."""
    replaced = {
        other
        for pair in _EXCLUDE_EACH_OTHER
        for key, other in (pair, pair[::-1])
        if key in given
    }
    replaced |= {pin for key, pin in _PINS.items() if key in given}
    return {
        key: value for key, value in raw.items() if key in given or key not in replaced
    }


def _origin(
    error: ValidationError, where: str, overrides: dict[str, Any], sets: list[str]
) -> str:
    """Return the file or flag of the first error."""
    loc = error.errors()[0]["loc"]
    key = str(loc[0]) if loc else ""
    if overrides.get(key) is not None:
        return f"--{ {'strategies': 'strategy'}.get(key, key).replace('_', '-') }"
    for item in sets:
        if _set_key(item) == key:
            # written by the flag
            return "--until" if item.startswith("until.ci_width=") else f"--set {item}"
    return where
