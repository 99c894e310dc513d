"""Fine-tuning of the trained models of a comparison on labeled tasks, and the verdicts on their scores."""
