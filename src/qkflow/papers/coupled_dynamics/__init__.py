"""Coupled query-key dynamics (Gahtan & Bronstein 2026, arXiv 2604.01683)."""
