"""Couplings: maps of a token's query and key between projection and scoring. One file each.

`base` is the contract, `layers` has building blocks, `low_rank` the exact fast form of euler and leapfrog. To
add a coupling, copy `drift.py` and change the equation and the name: the registry finds the file, and the
contract suite, the command line, comparisons, benchmarks, probes and reports use it.
"""

from qkflow.attention.couplings.base import Coupling, build, check, get, names, options

__all__ = ["Coupling", "build", "check", "get", "names", "options"]
