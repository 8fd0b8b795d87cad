"""Predictions against measurements: of this machine's runs, of clusters in many placements, and published ones."""
