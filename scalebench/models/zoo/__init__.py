"""Models of scalebench, one family per file. Each module registers its models at import."""
