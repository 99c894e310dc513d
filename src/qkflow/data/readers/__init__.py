"""Readers: text files, tables, documents within a text, and Hugging Face datasets."""
