"""The main comparison of the paper, for any corpus: `qkflow reproduce coupling`."""

from qkflow.papers.paper_study import PaperStudy, Stage

STUDY = PaperStudy(
    "Gahtan & Bronstein, arXiv 2604.01683",
    "coupled queries and keys lower perplexity by 6 to 7% at 60M parameters, Euler and leapfrog alike, "
    "and an uncoupled network of the same size does not",
    tokens="1M",
    seeds=3,
    stages=(Stage("main", ("standard", "drift", "euler", "leapfrog")),),
    settings={"controls": "symmetric,uncoupled", "inits": "gpt2,fan_in"},
)
