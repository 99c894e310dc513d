"""What can be measured on a model: how well it predicts text, where its attention goes, how faithfully."""
