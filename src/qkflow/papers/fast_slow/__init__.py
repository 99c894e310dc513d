"""The fast-slow limit of Gao 2026 (arXiv 2606.16730): master equation, convergence in ε, variational fit."""
