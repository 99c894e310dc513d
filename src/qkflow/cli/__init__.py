"""The `qkflow` command line."""
