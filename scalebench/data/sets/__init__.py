"""The data sets, one family a file. Each module registers its recipes when it is imported."""
