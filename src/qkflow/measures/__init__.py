"""Measures of a model: language modeling loss, attention weights, faithfulness, circuits, the slow path."""
