"""Times for Extra-P, as JSON Lines.

Extra-P (A. Calotoiu et al., SC 2013, doi:10.1145/2503210.2503277) reads one JSON object per line: `params`, the
parameters of the measurement; `callpath`, what was measured; `metric`; and `value`, the repetitions. It refuses a file
in which a callpath lacks a point that another one has, so series with other worker counts get a file of their own. It
models from five points on, and takes a file of one line for another format: what no law is fitted to is left out. Its
models grow unless told otherwise, so beside the time there are the worker-seconds N T, which do not fall.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scalebench.analysis.laws.series import FEWEST_COUNTS, Series
from scalebench.errors import ResultsError
from scalebench.study.spec import slug


def write_extrap(found: Sequence[Series], file: Path) -> list[Path]:
    """Write the fitted runs of `found` (see `Series.refusal`) to `file`; returns the files written.

    One file per execution, engine and set of worker counts: `file` itself if that is all, else `file` with these
    in its name. Extra-P keeps none of them apart, and a model over two of them would mix what must not be mixed.

    Raises:
        ResultsError: there is nothing to write, or the file cannot be written.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], list[Series]] = {}
    for series in found:
        if not series.refusal:
            counts = tuple(int(count) for count in series.counts)
            groups.setdefault((series.execution, series.engine, counts), []).append(series)
    if not groups:
        raise ResultsError(f"nothing to export to Extra-P: no strategy ran at {FEWEST_COUNTS} worker counts")
    files = []
    for (execution, engine, counts), members in groups.items():
        name = execution if execution == engine else f"{execution}-{engine}"
        others = [key for key in groups if key[:2] == (execution, engine)]
        points = f"-at-{'-'.join(map(str, counts))}" if len(others) > 1 else ""
        target = file if len(groups) == 1 else file.with_name(slug(f"{file.stem}-{name}{points}") + file.suffix)
        try:
            target.write_text("".join(_lines(members)), encoding="utf-8")
        except OSError as error:
            raise ResultsError(f"cannot write {target}: {error.strerror}; give another file to --extrap") from None
        files.append(target)
    return files


def _lines(members: Sequence[Series]) -> list[str]:
    return [
        json.dumps(
            {
                "params": {"workers": int(count)},
                "callpath": series.label.replace("->", "-"),  # which Extra-P takes for a call
                "metric": metric,
                "value": (factor * series.seconds[series.at == count]).tolist(),
            }
        )
        + "\n"
        for series in members
        for count in series.counts
        for metric, factor in (("train_s", 1.0), ("worker_s", count))
    ]
