"""The synthetic studies of the report's tests serve the artifact's too."""

from tests.report.conftest import keep, opened, page, results, small

__all__ = ["keep", "opened", "page", "results", "small"]
