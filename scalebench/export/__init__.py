"""Write records in the formats of other tools: Parquet, JSON, MLflow's file store."""

from scalebench.export.json_file import json_text, write_json
from scalebench.export.mlflow import write_mlflow
from scalebench.export.parquet import write_parquet
from scalebench.export.tables import tables

__all__ = ["json_text", "tables", "write_json", "write_mlflow", "write_parquet"]
