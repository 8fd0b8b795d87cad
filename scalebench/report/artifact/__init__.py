"""What a reviewer is handed: a description, the records, the figures, the software, and one script that checks them."""

from scalebench.report.artifact.packing import Artifact, write_artifact
from scalebench.report.artifact.paper import Paper, load_paper
from scalebench.report.artifact.verifying import Verdict, verify_artifact

__all__ = ["Artifact", "Paper", "Verdict", "load_paper", "verify_artifact", "write_artifact"]
