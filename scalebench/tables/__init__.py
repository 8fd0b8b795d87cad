"""Tables: a quantity is a column, written down once; each medium writes the same columns in its own way."""

from scalebench.tables.printed import FORMATS, records, render
from scalebench.tables.table import Column, Entry, Form, Table

__all__ = ["FORMATS", "Column", "Entry", "Form", "Table", "records", "render"]
