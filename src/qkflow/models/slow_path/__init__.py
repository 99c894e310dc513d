"""The slow path: attention over pooled tokens, fed back to the token-rate path through a gate."""
