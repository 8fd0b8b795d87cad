"""The models that come with scalebench, one family a file. Each module registers its models when imported."""
