"""Faster query-key learning (Vashisht & Ramaswamy, ICML 2026, arXiv 2608.06776): theory, controlled task."""
