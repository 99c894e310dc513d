"""Words with one meaning here, and the words they replaced.

The terms are those of PyTorch, Hugging Face and the papers (see the glossary in CONTRIBUTING.md), so that a
reader finds what they search for. Each entry is a regular expression, and what to write instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def word(*alternatives: str) -> str:
    """Return a pattern for whole words; an underscore ends a word, so `at_rest` and `_lanes` match too."""
    joined = "|".join(text.replace(" ", r"[ _\n]+") for text in alternatives)
    return rf"(?<![A-Za-z])(?:{joined})(?![A-Za-z])"


EVERYWHERE = {
    # parameters and inits
    word("start parameters", "best starts?", "(?:the |these |those |same |both |all |two )starts"): "init",
    r"starts\.py|--starts?\b|(?:best|badly)[- ]started|best-start|:start=": (
        "init.py, --inits, best-initialized, init="
    ),
    word("made anew", "anew"): "rebuilt, again",
    # inference
    word(
        "at rest", "resting", "AtRest", "AsEver", "as ever", "in midst", "passes by"
    ): "prepare_for_inference",
    word("by hand", "ByHand", "looked into"): "custom autograd function, is_transformed",
    word("unwatched", "untouched"): "has_no_hooks, is_plain_linear",
    word("take linear drift", "LARGEST AT REST"): "linear_drift",
    # modules do not talk
    word(
        "listens?", "listening", "listeners?", "Listener", "hears?", "heard", "speaks?", "spoke"
    ): "read, apply",
    # shapes
    r"(?<!n_)(?<!num_)\bkv_heads\b": "n_kv_heads",
    word("head sizes?"): "head_dim",
    word("from input", "project together"): "project_and_couple",
    # training
    word("Team", "leads"): "DistContext, is_main",
    word("process alone", "alone in"): "lock_run_dir",
    word("goes? on", "going on", "went on", "gone on"): "resume, continue",
    word("processors?"): "CPU",
    # studies
    word("contestants?", "Contestants?"): "variant, Arm",
    r"\bQuestion\(|class Question\b": "ComparisonConfig",
    word("Watched", "Board", "last words"): "RunTracker, LiveTable, last_log_line",
    word(
        "glance", "lanes?", "truths", "Wanted"
    ): "quick_eval, batched_circuits, label_probabilities, DataLimits",
    word("rankings"): "attribution",
    # hf
    word("anatomy", "overlooked", "make up", "makes up", "ask layout", "self attentions"): (
        "attention_layers, unsupported_layers, inject_random_projection, infer_qkv_layout"
    ),
    r"\brestart\(|" + word("restarted"): "reinitialize",
    word("couplings changed"): "sync_config",
    r"(?<![\w/.-])hub\.(?=[a-z_]+\()|qkflow\.hub\b|qkflow import hub": "hf",
    # data
    word("passages", "shards"): "documents, token_set",
    # numbers
    word("no numbers", "not numbers", "likeliest", "commonest"): "NaN, argmax, most frequent",
    word("put away", "brought back"): "offloaded, moved back",
    # spelling
    word("colours?", "coloured"): "color",
    word("learnt"): "learned",
    r"(?i)\b\w*?(?:token|normal|initial|parameter|factor|material|optim|serial|organ|general|recogn|summar|"
    r"regular|penal|categor|standard|minim|maxim|random|vector|quant|parallel|symmetr|util|synchron|"
    r"special|visual|real|emphas|central|local|final|character|author)"
    r"is(?:e|es|ed|er|ers|ing|ation|ations|able)\b": "-ize",
    word("licence", "licences"): "license",
}
SOURCE_ONLY = {
    r"^\s*(?:said|told|asked|wanted|given|found|heard|few)\b *(?::[^=\n]+)?=(?!=)": ("a name for the value"),
    r"\bdef (?:refuse|say|tell|ask|hear)_\w+": "check_*, a verb for what it computes",
}


ALLOWED = {
    ("src/qkflow/__init__.py", "qkflow.hub"),  # the error for the old name
    ("src/qkflow/cli/main.py", "--start"),  # renamed options
    ("src/qkflow/cli/main.py", "--starts"),
    ("src/qkflow/config_io.py", "head_size"),  # renamed keys
    ("src/qkflow/config_io.py", "kv_heads"),
    ("src/qkflow/data/token_set.py", "licence"),  # a key of the manifest, format 1
    ("src/qkflow/hf/attention_layers.py", "head_size"),  # an attribute of `transformers` layers
    ("src/qkflow/hf/pretrained.py", "processor"),  # `post_processor` of the `tokenizers` library
    ("src/qkflow/system.py", "processor"),  # `platform.processor`
}


def occurrences(text: str, patterns: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    for pattern, instead in patterns.items():
        for match in re.finditer(pattern, text, re.M):
            yield text.count("\n", 0, match.start()) + 1, match[0].strip(), instead


def scanned_files() -> list[Path]:
    source = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".html", ".js")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(source) + sorted(pages)


def scan() -> list[str]:
    hits = []
    for path in scanned_files():
        patterns = EVERYWHERE | (SOURCE_ONLY if path.suffix == ".py" else {})
        name = path.relative_to(ROOT).as_posix()
        text = re.sub(r"https?://\S+", "", path.read_text("utf-8"))  # the words of others
        for line, found, instead in occurrences(text, patterns):
            if (name, found) not in ALLOWED:
                hits.append(f"{name}:{line}: '{found}' (write: {instead})")
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for _, found, instead in occurrences(node.name, EVERYWHERE):
                    hits.append(f"{path.relative_to(ROOT)}: {node.name}: '{found}' (write: {instead})")
    return hits


def test_no_replaced_word_is_used() -> None:
    hits = scan()
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("text", ["_lanes = 1", "the model at rest", "tokeniser", "Attention(8, kv_heads=2)"])
def test_replaced_words_are_found(text: str) -> None:
    assert list(occurrences(text, EVERYWHERE))


@pytest.mark.parametrize("text", ["n_kv_heads", "num_kv_heads=2", "planes", "restarting is not it"])
def test_words_in_use_are_not_flagged(text: str) -> None:
    assert not list(occurrences(text, EVERYWHERE))
