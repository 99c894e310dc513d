"""Text into tokens, and tasks into examples."""
