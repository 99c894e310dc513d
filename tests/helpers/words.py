"""What the tests' own texts are made of."""

WORDS = [
    "the",
    "a",
    "sun",
    "moon",
    "river",
    "stone",
    "light",
    "water",
    "moves",
    "sings",
    "under",
    "over",
    "near",
    "and",
    "but",
    "then",
    "slowly",
    "again",
]
