"""Write records in the formats of other tools: Parquet, JSON, MLflow's file store."""

from scalebench.export.mlflow import write_mlflow
from scalebench.export.record_files import json_text, tables, write_json, write_parquet

__all__ = ["json_text", "tables", "write_json", "write_mlflow", "write_parquet"]
