"""Whether a study can carry what will be said of it: rules of method, each one class, found by name.

A new rule is one new class in this package, or in another package through the entry points `scalebench.rules`.
"""

from scalebench.analysis.methodology.base import RULES, Evidence, Rule, evidence_in
from scalebench.analysis.methodology.checking import Report, check

__all__ = ["RULES", "Evidence", "Report", "Rule", "check", "evidence_in"]
