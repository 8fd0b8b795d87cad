"""What a reviewer is handed: a description, the records, the figures, the software, and one script that checks them."""

from scalebench.artifact.packing import Artifact, write_artifact
from scalebench.artifact.paper import Paper, load_paper
from scalebench.artifact.verifying import Verdict, verify_artifact

__all__ = ["Artifact", "Paper", "Verdict", "load_paper", "verify_artifact", "write_artifact"]
