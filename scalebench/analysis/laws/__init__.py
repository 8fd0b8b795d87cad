"""Scaling laws: fitted laws, their intervals, and recommended worker counts."""

from scalebench.analysis.laws.bands import band_name, curve, no_band
from scalebench.analysis.laws.render import write_extrap
from scalebench.analysis.laws.series import series_of
from scalebench.analysis.laws.worker_counts import (
    EFFICIENCY,
    Advice,
    Count,
    Scaling,
    all_laws,
    scaling_laws,
    scaling_of,
)

__all__ = [
    "EFFICIENCY",
    "Advice",
    "Count",
    "Scaling",
    "all_laws",
    "band_name",
    "curve",
    "no_band",
    "scaling_laws",
    "scaling_of",
    "series_of",
    "write_extrap",
]
