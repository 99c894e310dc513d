"""What trained models do, in numbers."""
