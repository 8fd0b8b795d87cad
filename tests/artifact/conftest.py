"""Fixtures shared with the tests of the report."""

from tests.report.conftest import keep, opened, page, results, small

__all__ = ["keep", "opened", "page", "results", "small"]
