"""What is trained on: data sets, blocked arrays, and who trains on which sample when."""
