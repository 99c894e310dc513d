"""Scorings: how queries and keys become weights, and weights an output. One file each."""

from qkflow.attention.scorings.base import Scoring, build, check, get, names

__all__ = ["Scoring", "build", "check", "get", "names"]
