"""The slow path: attention over block means of tokens, added to the token-rate path through a gate."""
