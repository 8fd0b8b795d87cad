"""Scaling laws: fitted laws, their intervals, and recommended worker counts."""

from scalebench.analysis.laws.bands import band_name, curve, no_band, reach
from scalebench.analysis.laws.candidates import Candidate
from scalebench.analysis.laws.render import write_extrap
from scalebench.analysis.laws.series import Series, series_of
from scalebench.analysis.laws.worker_counts import (
    EFFICIENCY,
    Advice,
    Count,
    Scaling,
    scaling_laws,
    scaling_of,
)

__all__ = [
    "EFFICIENCY",
    "Advice",
    "Candidate",
    "Count",
    "Scaling",
    "Series",
    "band_name",
    "curve",
    "no_band",
    "reach",
    "scaling_laws",
    "scaling_of",
    "series_of",
    "write_extrap",
]
