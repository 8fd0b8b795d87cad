"""What a study runs on: clusters, their networks, and what the engines themselves cost."""
