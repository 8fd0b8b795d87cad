"""Clusters, network cost models and costs of communication engines."""
