"""A small byte-level BPE tokenizer, and texts that are hard to split."""

from __future__ import annotations

from hypothesis import strategies as st

from qkflow.data import synthetic
from qkflow.data.tokenizer import HuggingFaceTokenizer, train_bpe

# Runs and kinds of whitespace, contractions, digits, combining marks, other scripts.
HARD_TEXT = st.text(
    st.sampled_from(
        "  \n\t\r\x0b\x1c\x1f\x85\xa0\u1680\u2003\u2028\u200b\u3000ab'sdlé1²٣.,<|>endoftext漢字🙂\u0301"
    ),
    max_size=60,
)


def train_small_bpe(vocab_size: int = 400) -> HuggingFaceTokenizer:
    texts = [
        *synthetic.parse_options("patterns", "documents=30,words=200").generate_documents(),
        "don't  the the\n\n  the 12 12. <|endoftext|>  end" * 20,
    ]
    return train_bpe(iter(texts), vocab_size)


BPE = train_small_bpe()
