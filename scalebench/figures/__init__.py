"""Figures of a study, one file each."""

from scalebench.figures.base import default_figures, describe_figures, figure_names
from scalebench.figures.plotting import Drawn, PlotRequest, plot, plot_folder

__all__ = [
    "Drawn",
    "PlotRequest",
    "default_figures",
    "describe_figures",
    "figure_names",
    "plot",
    "plot_folder",
]
