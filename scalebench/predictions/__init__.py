"""Predictions in words, tables and rows: of points, of a number that is varied, of layouts, of epochs to a target."""
