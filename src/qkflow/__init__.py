"""qkflow: the dynamics of attention."""

__version__ = "0.1.0"
