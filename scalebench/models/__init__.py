"""What is trained, and how good it is. A model's options are checked without importing torch."""
