"""Studies as batch jobs: submitted from a login node, explained while they wait, and collected into one record."""
