"""Statistics of a study: cells, comparisons, agreement, laws and rules of method; computed from rows, never stored."""

from scalebench.analysis.comparing import against, differences, ratios
from scalebench.analysis.grouping import cells
from scalebench.analysis.intervals import bootstrap_cells, bootstrap_interval
from scalebench.analysis.laws import scaling_laws
from scalebench.analysis.loading import Results, load
from scalebench.analysis.methodology import Finding, check, findings
from scalebench.analysis.native_check import agreement, virtual_error
from scalebench.analysis.summary import summary, summary_notes, summary_table
from scalebench.analysis.target import target_ratios, times_to_target
from scalebench.analysis.verdicts import compare_strategies, compare_studies

__all__ = [
    "Finding",
    "Results",
    "against",
    "agreement",
    "bootstrap_cells",
    "bootstrap_interval",
    "cells",
    "check",
    "compare_strategies",
    "compare_studies",
    "differences",
    "findings",
    "load",
    "ratios",
    "scaling_laws",
    "summary",
    "summary_notes",
    "summary_table",
    "target_ratios",
    "times_to_target",
    "virtual_error",
]
