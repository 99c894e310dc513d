"""Readers: text files, tables, documents within text, and Hugging Face data sets."""
