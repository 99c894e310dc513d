"""What can be measured on a model: how well it predicts text, and where its attention goes."""

"""What trained models do, in numbers."""
