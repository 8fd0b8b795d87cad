"""The study.yaml of a results folder: a later command continues the same study there, never another one."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from scalebench.data.catalog import with_checksum
from scalebench.errors import ResultsError, writing
from scalebench.formatting import counted
from scalebench.models.pinning import PINS, STRATEGIES, pinned
from scalebench.records.attempts import Attempts
from scalebench.records.folder import RUNS, STUDY
from scalebench.records.provenance import redact
from scalebench.strategies.parts import with_default_batch
from scalebench.study.load import dump_study, load_study
from scalebench.study.spec import Study
from scalebench.system.file_access import write_atomic

# Keys that may change while the study stays the same: they add points and leave the
# meaning of old ones.
_MAY_CHANGE = {
    "name",
    "description",
    "label",
    "workers",
    "strategies",
    "repetitions",
    "until",
    "time_limit_s",
    "save_weights",
    "calibration_budget_s",
    "require_quiet",
    "native_budget_s",
    "patience",
    "launcher",
}
_DATA = "dataset_sha256"
_SHOWN = 4  # differing keys in a message
_DIGITS = 12  # of a checksum in a message
_LONGEST = 76  # characters of a name before a number is appended


def keep_study(folder: Path, study: Study) -> None:
    """Write study.yaml, or refuse a changed study with the names of the changed keys.

    Raises:
        ResultsError: `folder` holds another study of this name, or cannot be written.
    """
    require_same(folder, study)
    replace_study(folder, study)


def require_same(folder: Path, study: Study) -> None:
    """Raise ResultsError with the names of the changed keys if `folder` holds another study of this name."""
    changed = changes(folder, study)
    if changed:
        more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise ResultsError(
            f"{folder} holds another study of this name ({'; '.join(changed[:_SHOWN])}{more}); "
            "use --new, --name or --output for the new one, or delete the old one"
        )


def replace_study(folder: Path, study: Study) -> None:
    """Write study.yaml, its description without credentials and homes, or raise ResultsError."""
    study = study.model_copy(
        update={"description": redact(study.description, names=False)}
    )
    with writing(folder):
        write_atomic(folder / STUDY, dump_study(study))


def changes(folder: Path, study: Study) -> list[str]:
    """Differences of `study` from the one in `folder`, as "key was a, is b"; empty without study.yaml.

    A study.yaml without the checksum of the data, as earlier versions wrote it, is one
    of the data in the rows.
    """
    path = folder / STUDY
    if not path.exists():
        return []
    if (
        study.dataset_sha256 is not None
        and study.scaling == "strong"
        and (folder / RUNS).is_file()
    ):
        # under weak scaling data grow with the workers, and rows differ in their
        # checksum
        data = Attempts(folder / RUNS).other_data(study.dataset_sha256)
    else:
        data = []
    # through the model, so that defaults and spellings make no difference
    before = load_study(path, {}, []).model_dump(mode="json")
    now = study.model_dump(mode="json")
    for values in (before, now):
        # where tasks are computed, another address in each batch job
        del values["tasks"]["scheduler"]
    # Of the strategies, which may be added to, only the contents of those in both are
    # compared.
    own = [values.pop(STRATEGIES) for values in (before, now)]
    contents = [
        {f"{STRATEGIES} of {name}": digest for name, digest in digests.items()}
        for digests in own
    ]
    if before[_DATA] is None:
        before.pop(_DATA)
    found = [
        f"{key} was {_short(key, before)}, is {_short(key, now)}"
        for before, now in ((before, now), contents)
        for key in now
        if key not in _MAY_CHANGE and key in before and before[key] != now[key]
    ]
    if data and not any(text.startswith(_DATA) for text in found):
        was = "/".join(sorted({digest[:_DIGITS] for digest in data}))
        found.append(
            f"{_DATA} was {was} in {counted(len(data), 'row')}, is {_short(_DATA, now)}"
        )
    return found


def _short(key: str, values: dict[str, Any]) -> Any:
    """The value of `key`, shortened if it is a checksum."""
    is_checksum = key in (_DATA, *PINS) or key.startswith(STRATEGIES)
    return str(values[key])[:_DIGITS] if is_checksum else values[key]


def with_a_folder_of_its_own(output: Path, study: Study) -> Study:
    """Rename `study` to NAME-2, NAME-3 ... if `output`/NAME holds another study.

    The first name is taken that is free or whose folder holds the same study, which
    then continues. The contents of files are those of now, whatever `study` states.
    """
    # a file that names checksums of before would make every folder another study's
    study = study.model_copy(update={**dict.fromkeys((_DATA, *PINS)), STRATEGIES: {}})
    study = with_checksum(pinned(with_default_batch(study)))
    for number in count(1):
        named = (
            study
            if number == 1
            else study.model_copy(update={"name": f"{study.name[:_LONGEST]}-{number}"})
        )
        if not changes(output / named.name, named):
            return named
    raise AssertionError("unreachable")
