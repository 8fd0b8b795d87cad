"""Data sets, one family per file. Each module registers its builders at import."""
