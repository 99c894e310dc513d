"""Sections of a tokenizer.json on which the `tokenizers` library panics or fails: it loads, or it encodes."""

from __future__ import annotations

from typing import Any

SLOW = {"type": "Split", "pattern": {"Regex": r"(\w+\s?)*$^"}, "behavior": "Isolated", "invert": False}
TEMPLATE = [{"SpecialToken": {"id": "zz", "type_id": 0}}]
HOSTILE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "chunks of 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "slow regex": {"pre_tokenizer": SLOW},
    "no unknown token": {"model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"zz": 0}}},
    "huge id": {"model": {"type": "WordLevel", "unk_token": "zz", "vocab": {"zz": 2**32 - 1}}},
}
# refused in some commands only: those that use what is wrong
MORE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "template": {"post_processor": {"type": "TemplateProcessing", "single": TEMPLATE, "pair": []}},
    "padding": {"padding": {"strategy": {"Fixed": 10**11}, "direction": "Right", "pad_id": 0}},
    "no unigrams": {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}},
}
