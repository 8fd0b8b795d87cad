"""The pictures of README.md and of the documentation, all from one fresh run: `python docs/_generate/pictures.py`.

Runs the studies (some minutes on two quiet cores) in a temporary folder, draws each
figure, takes the picture of the report with Chromium and of the printed page with
pdflatex where they are installed, and writes all to docs/images. The points of
docs/accuracy.md are those of `experiments/`. Each picture keeps as text the version
that drew it, the number of the run that all share, its study with a digest of the
records, and the study's answer.

`--check` (in `tox run -e pages`) draws nothing: it fails if a picture is not of this
version or not of the same run as the others, or if README.md quotes another answer than
that of its picture.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pandas as pd
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from scalebench import __version__
from scalebench.analysis import load
from scalebench.figures import figure_names
from scalebench.figures.predicted import write_prediction_error
from scalebench.report.answer import spoken

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs/images"
DEFAULT = "digits-strong-scaling"
_SIMULATED = (
    *(
        "--execution",
        "virtual",
        "--cluster",
        "juwels-booster",
        "--device-step-time",
        "0.001",
        "--workers",
        "1..16",
    ),
    *(
        "--repetitions",
        "3",
        "--set",
        "virtual.jitter=lognormal",
        "--set",
        "virtual.jitter_sigma=0.1",
    ),
)
# Flags of `scalebench run` by the name of the study; `my-study` is that of `scalebench
# init`.
STUDIES: dict[str, tuple[str, ...]] = {
    DEFAULT: ("--workers", "1..64"),
    "my-study": ("study.yaml",),
    "gallery": (
        *_SIMULATED,
        *(
            "--dataset",
            "digits",
            "--epochs",
            "8",
            "--lr",
            "0.1",
            "--set",
            "target_metric=0.85",
        ),
        *("--set", "label=A perceptron (9,610 parameters) on handwritten digits"),
        *(
            "--strategy",
            "serial",
            "--strategy",
            "allreduce",
            "--strategy",
            "horovod",
            "--strategy",
            "epoch_average",
        ),
        *("--strategy", "local_sgd: {steps: 8}"),
    ),
    "weak": (
        *_SIMULATED,
        *("--set", "scaling=weak", "--epochs", "3"),
        *(
            "--dataset",
            "synthetic: {n_train: 512, n_test: 500, features: 32, classes: 5}",
        ),
        *(
            "--strategy",
            "serial",
            "--strategy",
            "allreduce",
            "--strategy",
            "epoch_average",
        ),
    ),
    "tuned": (
        *_SIMULATED,
        *(
            "--workers",
            "1,8,16",
            "--dataset",
            "digits",
            "--epochs",
            "4",
            "--set",
            "target_metric=0.85",
        ),
        *(
            "--strategy",
            "serial",
            "--strategy",
            "allreduce",
            "--strategy",
            "epoch_average",
        ),
        *("--set", "tune={over: {lr: [0.01, 1.0]}, trials: 8}"),
    ),
}
OF_STUDY = {
    "weak-scaling": "weak",
    "agreement": "my-study",
    "tuning": "tuned",
}  # figures; all others: gallery
POINTS = {
    "this-machine": "this-machine/points-paced.csv",
    "shaped-links": "shaped-links/points.csv",
}
_SCREEN, _PHONE = (1040, 820), (400, 820)
# Numbers of an answer: the time saved, and the two times.
_NUMBERS = re.compile(
    r"[\d.]+ % less time|[\d.,]+ \w+(?: in \d+ epochs?)? instead of [\d.,]+ \w+"
)


def main() -> None:
    if "--check" in sys.argv[1:]:
        sys.exit(
            "\n".join(
                problems(IMAGES, (ROOT / "README.md").read_text(encoding="utf-8"))
            )
            or 0
        )
    run = uuid.uuid4().hex[:12]
    with tempfile.TemporaryDirectory(prefix="scalebench-pictures-") as folder:
        os.chdir(folder)
        _scalebench("init")
        for name, flags in STUDIES.items():
            _scalebench(
                "run", *flags, *(() if "study.yaml" in flags else ("--name", name))
            )
        for path, picture in _drawn():
            study = picture[0]
            _keep(path, picture[1], run, study)
            print(path.relative_to(ROOT))


def problems(images: Path, readme: str) -> list[str]:
    """Return a line for each picture that is not of this version or run, or whose answer the README does not quote."""
    found = []
    pictures = {path: _facts(path) for path in sorted(images.rglob("*.png"))}
    runs = [str(facts.get("Run")) for facts in pictures.values()]
    common = max(sorted(set(runs)), key=runs.count, default="")
    for path, facts in pictures.items():
        name = path.relative_to(images)
        version = str(facts.get("Software", "an unknown version"))
        if version != f"scalebench {__version__}":
            found.append(
                f"docs/images/{name}: drawn by {version}, expected {__version__}"
            )
        elif facts.get("Run") != common:
            found.append(f"docs/images/{name}: of another run than the other pictures")
    answer = str(pictures.get(images / "strong-scaling.png", {}).get("Answer", ""))
    quoted = re.sub(r"\s+", " ", re.sub(r"[*>`]", "", readme))
    missing = [
        number for number in _NUMBERS.findall(answer)[:2] if number not in quoted
    ]
    if missing:
        found.append(
            f"README.md does not say {' and '.join(missing)}, which its picture shows"
        )
    return [
        f"{line}; `python docs/_generate/pictures.py` draws all pictures"
        for line in found
    ]


def _facts(path: Path) -> dict[str | tuple[int, int], object]:
    with Image.open(path) as picture:
        return dict(picture.info)


def _drawn() -> Iterator[tuple[Path, tuple[str, Path | bytes]]]:
    """Draw each picture; yield where it belongs, with its study (or source) and the file or bytes."""
    for name in ("strong-scaling", "scaling-laws"):
        yield IMAGES / f"{name}.png", (DEFAULT, _plot(DEFAULT, name))
    for name in figure_names():
        study = OF_STUDY.get(name, "gallery")
        yield (
            IMAGES / f"figures/{name}.png",
            (study, _plot(study, name, "--width", "7in", "--caption", "none")),
        )
    predicted = (
        "resnet50",
        "--cluster",
        "ethernet-10g",
        "--step-time",
        "0.1",
        "--workers",
        "4..1024",
    )
    strategies = (
        "--strategy",
        "allreduce",
        "--strategy",
        "ddp",
        "--strategy",
        "local_sgd: {steps: 8}",
    )
    _scalebench("predict", *predicted, *strategies, "--figure", "prediction.png")
    yield (
        IMAGES / "prediction.png",
        ("resnet50 on ethernet-10g", Path("prediction.png")),
    )
    published = ROOT / "experiments/published/scaling.csv"
    _scalebench("validate", "--published", str(published), "--output", "published")
    yield (
        IMAGES / "prediction-error.png",
        ("experiments/published", Path("published/prediction-error.png")),
    )
    for name, points in POINTS.items():
        folder = Path(name)
        write_prediction_error(pd.read_csv(ROOT / "experiments" / points), folder)
        yield (
            IMAGES / f"{name}.png",
            (f"experiments/{points}", folder / "prediction-error.png"),
        )
    if report := _report():
        yield IMAGES / "report.png", (DEFAULT, report)
    if page := _page():
        yield IMAGES / "paper.png", ("gallery", page)


def _plot(study: str, name: str, *flags: str) -> Path:
    _scalebench("plot", f"results/{study}", "--figure", name, "--format", "png", *flags)
    return Path("plots") / study / f"{name}.png"


def _report() -> bytes | None:
    """Return the head of the report of the default study, and the same on a phone in the dark, side by side."""
    sys.path.insert(0, str(ROOT))
    from tests.report.chromium import Browser, chromium

    if chromium() is None:
        print("report.png stays as it is: Chromium is not installed", file=sys.stderr)
        return None
    _scalebench("report", f"results/{DEFAULT}", "--output", "report.html")
    browser = Browser(Path("profile"))
    browser.look(*_SCREEN)
    browser.open(Path("report.html").resolve())
    screen = Image.open(BytesIO(browser.screenshot())).convert("RGB")
    browser.look(*_PHONE, dark=True)
    top = browser.evaluate(
        "document.querySelector('figure').getBoundingClientRect().top + window.scrollY"
    )
    phone = (
        Image.open(BytesIO(browser.screenshot(int(top)))).convert("RGB").resize(_PHONE)
    )
    browser.close()
    both = Image.new("RGB", (_SCREEN[0] + 24 + _PHONE[0], _SCREEN[1]), "white")
    both.paste(screen, (0, 0))
    both.paste(phone, (_SCREEN[0] + 24, 0))
    kept = BytesIO()
    both.save(kept, "png")
    return kept.getvalue()


def _page() -> Path | None:
    """Return the page of the tutorial on figures for a paper, with the figure and the table of the gallery."""
    if not (shutil.which("pdflatex") and shutil.which("pdftoppm")):
        print(
            "paper.png stays as it is: pdflatex and pdftoppm are not installed",
            file=sys.stderr,
        )
        return None
    tutorial = (ROOT / "docs/tutorials/figure-for-a-paper.md").read_text(
        encoding="utf-8"
    )
    source = re.search(r"```latex\n(% paper\.tex\n.*?)```", tutorial, re.DOTALL)
    assert source is not None
    Path("paper.tex").write_text(
        source[1].replace("my-study", "gallery"), encoding="utf-8"
    )
    _scalebench("plot", "results/gallery", "--style", "ieee", "--format", "pdf")
    _scalebench(
        "table",
        "results/gallery",
        "--format",
        "latex",
        "--columns",
        "vs-allreduce,metric",
        "--output",
        "table.tex",
    )
    for _ in range(2):  # the second run knows the references
        subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "paper.tex"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    subprocess.run(
        ["pdftoppm", "-png", "-r", "80", "-singlefile", "paper.pdf", "paper"],
        check=True,
    )
    return Path("paper.png")


def _keep(path: Path, picture: Path | bytes, run: str, study: str) -> None:
    """Write a picture with the facts that `problems` reads."""
    facts = PngInfo()
    facts.add_text("Software", f"scalebench {__version__}")
    facts.add_text("Run", run)
    records = Path("results") / study / "runs.csv"
    digest = (
        f", records {hashlib.sha256(records.read_bytes()).hexdigest()[:12]}"
        if records.exists()
        else ""
    )
    facts.add_text("Source", f"{study}{digest}")
    if digest:
        facts.add_itxt(
            "Answer",
            next(
                (line for line in spoken(load(records.parent)) if "irtual" in line), ""
            ),
        )
    with Image.open(
        BytesIO(picture) if isinstance(picture, bytes) else picture
    ) as source:
        source.save(path, pnginfo=facts, optimize=True)


def _scalebench(*words: str) -> None:
    # or real runs could be left
    everything = os.environ | {"SCALEBENCH_NATIVE_BUDGET_S": "3600"}
    subprocess.run(
        ["scalebench", *words], check=True, stdout=subprocess.DEVNULL, env=everything
    )


if __name__ == "__main__":
    main()
