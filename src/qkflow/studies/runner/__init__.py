"""Runs of a study: engines, the queue that executes them, the live table, and the study directory."""
