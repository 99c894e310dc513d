"""Scorings: attention weights from queries and keys, and the output of the heads. One file each."""

from qkflow.attention.scorings.base import Scoring, build, check, get, names

__all__ = ["Scoring", "build", "check", "get", "names"]
