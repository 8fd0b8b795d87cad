"""Pack a study for reviewers: records, figures, description, software, and a script that checks them."""

from scalebench.artifact.artifact_description import PaperFile, load_paper
from scalebench.artifact.packing import Artifact, write_artifact
from scalebench.artifact.verification import Verdict, verify_artifact

__all__ = [
    "Artifact",
    "PaperFile",
    "Verdict",
    "load_paper",
    "verify_artifact",
    "write_artifact",
]
