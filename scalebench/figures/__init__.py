"""What the records look like: one file per figure."""

from scalebench.figures.base import describe_figures, figure_names
from scalebench.figures.plotting import FORMATS, plot

__all__ = ["FORMATS", "describe_figures", "figure_names", "plot"]
