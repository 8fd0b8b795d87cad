"""Models of a study as written in YAML, its tuning among them, and of one run of it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from scalebench.errors import nearest
from scalebench.study import choices
from scalebench.study.heterogeneity import VirtualOptions
from scalebench.study.validation import Share, StrictModel, parse_workers

# keys of a study; the others are options
TUNABLE = (
    "lr",
    "lr_decay",
    "lr_decay_every",
    "lr_warmup_epochs",
)
_DIGITS = 3  # significant digits of values drawn from a range
SIMULATED = ("virtual", "modelled")  # executions whose time is a price
_LR_DECAY = 0.1
_LARGEST_LR = 1e38  # float32 and bfloat16 end at 3.4e38
# accuracy of the default study; serial reaches it after the first epoch
DEFAULT_TARGET = 0.9
# of a study, and of an execution of it: planning takes some 20 seconds
MOST_RUNS = 100_000
ADAMW_DECAY = 0.01  # weight decay of adamw unless it is stated, as torch's
# optimizers whose steps depend on whole layers, which one flat vector cannot have
BY_LAYER = (
    "lars",
    "lamb",
    "muon",
)
TRIAL_SEED = MOST_RUNS  # added to the study's seed: no repetition has it
# limit of the random generators; the seed of a repetition is the study's plus its
# number
MOST_SEED = 2**32 - 1


class Tune(StrictModel):
    """Equal tuning of every strategy at every worker count.

    All get the same `trials` points of one quasi-random sequence over the search space
    `over`. A trial is a virtual run on `1 - validation` of the training samples, judged
    on the rest of them.
    """

    over: dict[str, list[Any]] = Field(
        min_length=1,
        description="by key (lr, optimizer.OPTION, STRATEGY.OPTION): a range [low, high], or a list of values",
    )
    trials: int = Field(
        16, ge=1, description="points of the search space, the same for every strategy"
    )
    metric: Literal["time_to_target", "final_metric"] = "time_to_target"
    validation: Annotated[Share, Field(gt=0, lt=1)] = Field(
        0.2, description="share of the training samples that judges trials"
    )

    @field_validator("over")
    @classmethod
    def _can_be_searched(cls, over: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in over.items():
            if fault := _fault(values):
                raise ValueError(f"{key}: {fault}, got {values!r}")
        return over

    def points(self, uniform: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        """Return the values of each trial, by key, from numbers u in [0, 1), (trials, keys).

        A range gives low (high / low)^u to 3 digits, whole numbers if both ends are
        written as whole numbers; a list of m values the one at floor(m u).
        """
        points = []
        for row in uniform:
            drawn = zip(self.over.items(), row, strict=True)
            points.append({key: _value(values, u) for (key, values), u in drawn})
        return points


def is_range(values: Sequence[Any]) -> bool:
    """Return True for [low, high], two numbers."""
    return len(values) == 2 and all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in values
    )


def _unknown_key(key: str, strategies: Collection[str]) -> str:
    """Return the error for a key of `over` that neither the training nor one of `strategies` has; empty if valid."""
    name, dot, option = key.partition(".")
    known = [
        *TUNABLE,
        "optimizer.OPTION",
        *(f"{strategy}.OPTION" for strategy in dict.fromkeys(strategies)),
    ]
    if (not dot and key in TUNABLE) or (option and name in ("optimizer", *strategies)):
        return ""
    return f"tune.over: unknown key {key!r}; {nearest(key, known)}"


def _fault(values: list[Any]) -> str:
    if not is_range(values):
        distinct = len({repr(value) for value in values})
        return (
            ""
            if distinct == len(values) > 1
            else "expected a range [low, high] or several distinct values"
        )
    low, high = values
    if low >= high:
        return "expected a range [low, high] with low < high"
    if low <= 0:
        return "a range is searched by its logarithm and begins above 0 (a list of three values or more is a choice)"
    return "" if math.isfinite(high) else "expected a finite range"


def _value(values: list[Any], u: float) -> Any:
    if not is_range(values):
        return values[int(u * len(values))]
    low, high = values
    value = low * (high / low) ** u
    if isinstance(low, int) and isinstance(high, int):
        return round(value)
    # rounding must not leave the range
    return min(max(float(f"{value:.{_DIGITS}g}"), low), high)


def _study_name(value: Any) -> Any:
    """Return `value` if it can name a folder, with a plain error where pydantic would show the pattern."""
    if isinstance(value, str) and not re.fullmatch(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", value
    ):
        raise ValueError(
            f"a name has letters, digits, . _ -, at most 80, and begins with a letter or digit; got {value[:60]!r}"
        )
    return value


Blocks = PositiveInt | tuple[PositiveInt, PositiveInt] | Literal["auto"]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80),
    BeforeValidator(_study_name),
]


class Component(StrictModel):
    """Name and raw options of a strategy, data set, model or optimizer; options are validated when it is resolved.

    Written as `name`, as `{name: {option: value}}` or as `{name: NAME, option: value}`.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict):
            # as `dump_study` and JSON write it
            if set(value) <= {"name", "options"} and "name" in value:
                return value
            if "name" in value:
                options = {key: item for key, item in value.items() if key != "name"}
                return {"name": value["name"], "options": options}
            if len(value) == 1:
                ((name, options),) = value.items()
                if options is None or isinstance(options, dict):
                    return {"name": name, "options": options or {}}
        raise ValueError(
            "expected a name, {name: {option: value}} or {name: NAME, option: value}"
        )

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in sorted(self.options.items()))})"

    def with_option(self, name: str, value: object) -> Component:
        """Return the component with one option changed."""
        return Component(name=self.name, options={**self.options, name: value})


class Until(StrictModel):
    """Repeat each point until the interval of its training time is narrow enough.

    Stopping rule: the 95 % interval of the times satisfies (high - low) / mean <=
    ci_width, mean the geometric mean. That is the whole width: 5% is about +-2.5 %. The
    interval is the t interval of logs at a nominal level that covers 95 % in spite of
    stopping at narrow intervals: 96 % at `at_least` runs, 97.2 % at `at_most`, 98.6 %
    between.
    """

    ci_width: Annotated[Share, Field(gt=0, le=1)]
    at_least: int = Field(
        3,
        ge=3,
        description="fewest runs of each point, before its interval is computed",
    )
    at_most: int = Field(20, le=1000, description="most runs of each point")

    @model_validator(mode="after")
    def _has_room(self) -> Until:
        if self.at_most < self.at_least:
            raise ValueError(
                f"at_most ({self.at_most}) lies below at_least ({self.at_least})"
            )
        return self


class TaskOptions(StrictModel):
    """Where the tasks of engine `tasks` are computed."""

    backend: choices.Backend = Field(
        "processes", description="processes of this node, dask.distributed, or Ray"
    )
    scheduler: str | None = Field(
        None,
        description="address of a running scheduler, such as tcp://node1:8786; without one, it is started here",
    )

    @model_validator(mode="after")
    def _processes_have_none(self) -> TaskOptions:
        if self.scheduler is not None and self.backend == "processes":
            raise ValueError(
                "tasks.scheduler is the address of dask or Ray; say backend: dask or backend: ray, too"
            )
        return self


class Training(StrictModel):
    """Settings shared by all runs of a study."""

    model_config = ConfigDict(validate_default=True)

    dataset: Component = Component(name="digits_shifted")
    data_dir: Path | None = None
    dataset_sha256: Sha256 | None = Field(
        None,
        description="of the data, where they are read from files; filled in when the study begins",
    )
    model: Component = Component(name="mlp", options={"hidden": [128]})
    model_sha256: Sha256 | None = Field(
        None, description="of your own model's file; filled in when the study begins"
    )
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    epochs: PositiveInt = 4
    optimizer: Component = Component(name="sgd", options={"momentum": 0.9})
    lr: PositiveFloat = 0.06  # best for serial in the default study (docs/models.md)
    lr_policy: Literal["constant", "linear", "cosine", "step", "optimizer_steps"] = (
        "constant"
    )
    lr_warmup_epochs: NonNegativeInt = 0
    lr_decay: float = Field(
        _LR_DECAY,
        gt=0,
        le=1,
        description="lr_policy step and optimizer_steps: factor of each decay",
    )
    lr_decay_every: PositiveInt | None = Field(
        None,
        description="epochs (lr_policy step) or optimizer steps of a worker (optimizer_steps) between two decays",
    )
    scaling: Literal["strong", "weak"] = "strong"
    batch_per_worker: PositiveInt | None = None
    batch_global: PositiveInt | None = None
    blocks: Blocks = Field(
        "auto",
        description="ds-tensor blocks, or a grid [rows, columns] of them, visited row by row; auto: one per worker",
    )
    partition: Component = Component(name="iid")
    shuffle: Literal["none", "in_block", "rotate_blocks", "pairwise", "global"] = (
        "in_block"
    )
    evaluate_every: NonNegativeInt = Field(
        1, description="epochs between evaluations; 0: only at the end"
    )
    target_metric: float | None = Field(
        None, description="metric whose time and epochs are a headline of their own"
    )
    cluster: str = Field(
        "this-machine", description="a shipped cluster's name or a YAML file"
    )
    cluster_sha256: Sha256 | None = Field(
        None, description="of that file; filled in when the study begins"
    )
    device_step_time: PositiveFloat | None = Field(
        None,
        description="seconds of one local step on the stated device; with batch_global, of a step of that batch",
    )
    threads_per_worker: PositiveInt = 1
    warmup_steps: NonNegativeInt = 10
    time_limit_s: PositiveFloat = 3600.0
    virtual: VirtualOptions = VirtualOptions()
    tasks: TaskOptions = Field(TaskOptions(), description="of engine tasks")
    save_weights: bool = False
    init_weights: Path | None = None
    init_weights_sha256: Sha256 | None = Field(
        None, description="of that file; filled in when the study begins"
    )

    @model_validator(mode="after")
    def _one_batch(self) -> Training:
        if self.batch_per_worker is not None and self.batch_global is not None:
            raise ValueError("give batch_per_worker or batch_global, not both")
        if self.batch_per_worker is None and self.batch_global is None:
            # A frozen model, which is still being made.
            object.__setattr__(self, "batch_per_worker", 16)
        return self

    @model_validator(mode="after")
    def _decays_at_times(self) -> Training:
        if (
            self.lr_policy in ("step", "optimizer_steps")
            and self.lr_decay_every is None
        ):
            unit = "epochs" if self.lr_policy == "step" else "optimizer steps"
            raise ValueError(
                f"lr_policy {self.lr_policy} needs lr_decay_every, in {unit}"
            )
        if (
            self.lr_policy not in ("step", "optimizer_steps")
            and self.lr_decay_every is not None
        ):
            raise ValueError(
                f"lr_decay_every has no effect with lr_policy {self.lr_policy}: step decays, leave it out"
            )
        if (
            self.lr_policy not in ("step", "optimizer_steps")
            and self.lr_decay != _LR_DECAY
        ):
            raise ValueError(
                f"lr_decay has no effect with lr_policy {self.lr_policy}: step decays, leave it out"
            )
        # a key without effect is refused: the study would not be the one that was meant
        if self.lr_policy != "linear" and self.lr_warmup_epochs:
            raise ValueError(
                f"lr_warmup_epochs has no effect with lr_policy {self.lr_policy}: linear warms up"
            )
        return self

    @property
    def number_of_blocks(self) -> int | None:
        """Number of blocks of the training rows; None for one per worker."""
        if self.blocks == "auto":
            return None
        return self.blocks if isinstance(self.blocks, int) else math.prod(self.blocks)

    @property
    def batch_policy(self) -> str:
        return "per_worker" if self.batch_per_worker is not None else "global"


class Study(Training):
    """A study: the training and the axes of the sweep."""

    name: Name = Field(
        "digits-strong-scaling",
        description="folder of the results; default: by data and scaling, as here",
    )
    description: str = ""
    label: str = Field(
        "",
        max_length=120,
        description="model and data in captions of figures; default: their names",
    )
    workers: Annotated[list[PositiveInt], BeforeValidator(parse_workers)] = Field(
        default_factory=lambda: parse_workers("1..64")
    )
    strategies: list[Component] = Field(
        default_factory=lambda: [
            Component(name=name)
            for name in (
                choices.SERIAL,
                *choices.BASELINES,
                "epoch_average",
                "epoch_async",
            )
        ],
        min_length=1,
    )
    strategy_sha256: dict[str, Sha256] = Field(
        {},
        description="of the files of your own strategies, by name; filled in when the study begins",
    )
    repetitions: PositiveInt = 3
    until: Until | None = Field(
        None,
        description="repeat each point until its time is known; replaces repetitions",
    )
    tune: Tune | None = Field(
        None, description="tune every strategy at every worker count, with equal trials"
    )
    warmup_runs: NonNegativeInt = Field(
        0, description="runs at the start of each native launch that do not count"
    )
    seed: int = Field(0, ge=0, le=MOST_SEED)
    execution: choices.Execution | Literal["auto"] = "auto"
    engine: choices.EngineName | Literal["auto"] = "auto"
    launcher: choices.LauncherName = Field(
        "auto",
        description="program that starts real ranks, unless --launcher names one; auto: by the allocation",
    )
    calibration: Path | None = Field(
        None, description="a calibration.json to charge virtual runs by"
    )
    calibration_budget_s: PositiveFloat = Field(
        30.0, description="seconds that measuring steps and engines may take"
    )
    require_quiet: bool = Field(
        False,
        description="refuse virtual times from what was measured beside busy programs",
    )
    native_budget_s: PositiveFloat | None = Field(
        None,
        description="seconds after which no real run begins; by default 90 where native runs check virtual ones",
    )
    patience: PositiveFloat = Field(
        60.0,
        description="seconds without a sign of life of any worker, after which a run of real processes is ended",
    )

    @model_validator(mode="after")
    def _slow_workers_exist(self) -> Study:
        named = dict.fromkeys(self.virtual.slowdown, "slowdown")
        named |= {window.rank: "slow_windows" for window in self.virtual.slow_windows}
        most = max(self.workers, default=1)
        for rank, key in named.items():
            if rank >= most:
                raise ValueError(
                    f"virtual.{key} names worker {rank}; the largest run has the workers 0 to {most - 1}"
                )
        return self

    @model_validator(mode="after")
    def _lr_is_a_number_of_its_dtype(self) -> Study:
        if self.dtype != "float64" and self.lr > _LARGEST_LR:
            raise ValueError(
                f"lr: {self.lr:g} is too large for {self.dtype}; expected at most {_LARGEST_LR:g}"
            )
        return self

    @model_validator(mode="after")
    def _few_enough_runs(self) -> Study:
        """Refuse sweeps that would exhaust the memory, such as 1..1000000:1."""
        each = self.repetitions + (self.tune.trials if self.tune else 0)
        # Before any run is planned, which takes memory for each.
        runs = len(self.workers) * len(self.strategies) * each
        if runs > MOST_RUNS:
            raise ValueError(
                f"{len(self.workers):,} worker counts, {len(self.strategies)} strategies and {each:,} repetitions and "
                f"trials make {runs:,} runs; a study has at most {MOST_RUNS:,}"
            )
        return self

    @model_validator(mode="after")
    def _can_be_tuned(self) -> Study:
        """Refuse a search space of other keys, a metric that the study lacks, and studies without virtual runs."""
        tune = self.tune
        if tune is None:
            return self
        if self.execution not in ("auto", "virtual"):
            raise ValueError(
                f"tune: trials are virtual runs, which execution {self.execution} excludes; use auto or virtual"
            )
        for key in tune.over:
            name, _, option = key.partition(".")
            if fault := _unknown_key(
                key, [component.name for component in self.strategies]
            ):
                raise ValueError(fault)
            if any(
                component.name == name and option in component.options
                for component in self.strategies
            ):
                raise ValueError(
                    f"tune.over: {key} is fixed in strategies; leave it out of one of the two"
                )
        if tune.metric == "time_to_target" and self.target_metric is None:
            raise ValueError(
                "tune.metric: time_to_target needs a target_metric in the study; or use final_metric"
            )
        if tune.metric == "time_to_target" and not self.evaluate_every:
            raise ValueError(
                "tune.metric: time_to_target needs evaluations; evaluate_every is 0"
            )
        return self

    @model_validator(mode="after")
    def _one_number_of_repetitions(self) -> Study:
        """Set `repetitions` to the fewest runs of each point with `until`."""
        if self.until is not None:
            if "repetitions" in self.model_fields_set:
                raise ValueError(
                    "give repetitions or until, not both; until.at_least is the fewest runs of each point"
                )
            # A frozen model, which is still being made.
            object.__setattr__(self, "repetitions", self.until.at_least)
        return self


class Run(Training):
    """One run of a study, as sent to the process that executes it."""

    study: str
    run_id: str
    config_hash: str
    attempt: PositiveInt = 1
    execution: choices.Execution
    engine: str = Field(description="virtual, or a native engine")
    strategy: Component
    strategy_sha256: Sha256 | None = Field(
        None, description="of your own strategy's file"
    )
    workers: PositiveInt
    repetition: NonNegativeInt
    seed: NonNegativeInt
    run_order: NonNegativeInt = 0
    trace: bool = Field(False, description="keep every lap of every worker")
    also_without_jitter: bool = Field(
        False, description="a virtual run is timed without jitter, too"
    )
    warmup: bool = Field(
        False, description="made to warm its launch up, in no statistic"
    )
    tuned: dict[str, Any] = Field(
        {}, description="values that tuning gave, by key of `tune.over`"
    )
    trial: NonNegativeInt | None = Field(
        None, description="number of the trial; None for runs that count"
    )
    validation: float | None = Field(
        None, description="of trials: share of the training samples that judges them"
    )

    @property
    def is_virtual(self) -> bool:
        """Whether workers of one process stand for its ranks, and its time is a price."""
        return self.engine == choices.VIRTUAL


def slug(text: str) -> str:
    """Return `text` as a valid file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "unnamed"
