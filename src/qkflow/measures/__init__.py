"""What can be measured on a model: how well it predicts text, and where its attention goes."""
