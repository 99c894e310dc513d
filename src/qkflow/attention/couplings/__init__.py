"""Couplings: what happens to a token's query and key between projection and score. One file each.

To add one, copy `drift.py`, change the mathematics and the name: the registry finds the file, and the
contract suite, the command line, the comparison, the benchmark and the report take it from there.
"""

from qkflow.attention.couplings.base import Coupling, build, check, get, names, options

__all__ = ["Coupling", "build", "check", "get", "names", "options"]
