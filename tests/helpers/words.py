"""Vocabulary of the random texts in tests."""

WORDS = [
    "the", "a", "sun", "moon", "river", "stone", "light", "water", "moves",
    "sings", "under", "over", "near", "and", "but", "then", "slowly", "again",
]  # fmt: skip
