"""What is said of predictions: of points, of a number that is varied, of the epochs to a target."""
