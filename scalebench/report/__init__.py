"""The report on a study: one self-contained HTML page."""
