"""Options that are keys of a study, as `run`, `trace`, `explain`, `calibrate` and `recalibrate` take them."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, TypeVar, get_args

import rich_click as click

from scalebench.cli.options import PATH, all_of
from scalebench.study.choices import EngineName, Execution

_F = TypeVar("_F", bound=Callable[..., Any])
_LR_POLICIES = ["constant", "linear", "cosine", "step", "optimizer_steps"]
_EXECUTIONS = (
    "native: real processes at their own speed; paced: real processes slowed to --device-step-time; virtual: real "
    "training in virtual time; modelled: virtual time without training; auto: virtual, and native where the cores "
    "allow."
)
STUDY_OPTIONS: dict[str, dict[str, Any]] = {
    "workers": {
        "metavar": "COUNTS",
        "help": "1..64 (powers of two), 1..64:8 (1,8,16,...) or 1,2,6.",
    },
    "dataset": {
        "metavar": "NAME",
        "help": "Data set; `scalebench list datasets` shows them.",
    },
    "data_dir": {"type": PATH, "help": "Where the files of a data set lie."},
    "model": {"metavar": "NAME", "help": "Model, or your own as file.py:factory."},
    "epochs": {"type": int, "help": "Passes over the training data in each run."},
    "repetitions": {
        "type": int,
        "help": "Runs of every point, each with its own seed.",
    },
    "scaling": {
        "type": click.Choice(["strong", "weak"]),
        "help": "Samples fixed in all, or per worker.",
    },
    "batch_per_worker": {"type": int, "help": "Samples in one worker's batch."},
    "batch_global": {"type": int, "help": "Samples in one step of all workers."},
    "lr": {"type": float, "help": "Learning rate."},
    "lr_policy": {
        "type": click.Choice(_LR_POLICIES),
        "help": "linear: multiplied by the workers; step and optimizer_steps: decayed every --set lr_decay_every=N.",
    },
    "execution": {
        "type": click.Choice(["auto", *get_args(Execution)]),
        "help": _EXECUTIONS,
    },
    "engine": {
        "type": click.Choice(get_args(EngineName)),
        "help": "Native engine of all strategies.",
    },
    "cluster": {"metavar": "NAME|FILE", "help": "What virtual runs stand for."},
    "device_step_time": {
        "type": float,
        "metavar": "SECONDS",
        "help": "One local step on the stated device.",
    },
    "dtype": {
        "type": click.Choice(["float32", "float64", "bfloat16"]),
        "help": "Of weights and gradients.",
    },
    "seed": {"type": int, "help": "Of the first repetition; each further one adds 1."},
    "name": {
        "metavar": "NAME",
        "help": "Name of the study, and of its results folder.",
    },
    "save_weights": {
        "is_flag": True,
        "default": None,
        "help": "Keep each run's initial and final weights as .npz.",
    },
    "init_weights": {
        "type": PATH,
        "metavar": "FILE.npz",
        "help": "Start from these weights.",
    },
    "patience": {
        "type": float,
        "metavar": "SECONDS",
        "help": "Time without a sign of life of any worker, after which a real run is ended.  [default: 60]",
    },
    "calibration": {
        "type": PATH,
        "metavar": "FILE",
        "help": "Charge virtual runs by this file.",
    },
    "require_quiet": {
        "is_flag": True,
        "default": None,
        "help": "Refuse what could only be measured beside busy programs.",
    },
    "native_budget_s": {
        "type": float,
        "metavar": "SECONDS",
        "envvar": "SCALEBENCH_NATIVE_BUDGET_S",
        "help": "Time after which no further real run begins.  [default: 90 beside virtual runs, outside of jobs]",
    },
    "calibration_budget_s": {
        "type": float,
        "metavar": "SECONDS",
        "envvar": "SCALEBENCH_CALIBRATION_BUDGET_S",
        "help": "Time that measuring steps and engines may take.  [default: 30]",
    },
}

study_argument = click.argument("study", type=PATH, required=False)
set_option = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other key of the study; repeatable.",
)


def study_options(*keys: str, hidden: Container[str] = ()) -> Callable[[_F], _F]:
    """Return a decorator that adds the options of `keys`; None where an option is not given.

    `--help` does not show those that are `hidden`.
    """
    return all_of(
        *(
            click.option(flag_of(key), key, hidden=key in hidden, **STUDY_OPTIONS[key])
            for key in keys
        )
    )


def flag_of(key: str) -> str:
    return (
        "--native-budget" if key == "native_budget_s" else f"--{key.replace('_', '-')}"
    )
