"""What a reader is handed: one self-contained page, and the description of an artifact."""
