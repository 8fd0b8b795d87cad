"""What the records mean: statistics, comparison, agreement. Computed from rows every time, never stored."""

from scalebench.analysis.comparing import ratios
from scalebench.analysis.grouping import cells
from scalebench.analysis.reading import Results, load
from scalebench.analysis.summary import summary_notes, summary_rows, summary_table
from scalebench.analysis.validation import agreement, median_error

__all__ = [
    "Results",
    "agreement",
    "cells",
    "load",
    "median_error",
    "ratios",
    "summary_notes",
    "summary_rows",
    "summary_table",
]
