"""`qkflow data ...`: list, prepare, describe and verify corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from qkflow import console
from qkflow.data import corpora, pipeline
from qkflow.data.cache import default_cache_dir
from qkflow.errors import InputError

CorpusArg = Annotated[str, tyro.conf.Positional]


def list_corpora(*, json: bool = False) -> None:
    """List the corpora known by name, with size and license.

    Besides these, a corpus is any path (text, JSONL, CSV, TSV, Parquet, also compressed; a file, a folder or
    a glob, with #column at its end) and any hub dataset (hf:owner/name:config).

    examples:
      qkflow data list
      qkflow data list --json

    Args:
        json: print one JSON object instead of a table.
    """
    rows = [_corpus_row(name, known) for name, known in corpora.CORPORA.items()]
    if json:
        console.emit_json({"corpora": rows, "cache": str(default_cache_dir())})
        return
    table = [
        [row["name"], row["size"], row["license"], f"{row['description']}\n{row['source']}"] for row in rows
    ]
    _print_table(["corpus", "size", "license", "description and source"], table)


def _corpus_row(name: str, entry: corpora.CorpusInfo) -> dict[str, str]:
    size = entry.size
    if not size:
        try:
            size = f"{corpora.resolve(name).n_bytes / 1e6:.0f} MB"
        except InputError:
            size = "not installed"
    source = f"hf:{entry.hub_spec}" if entry.hub_spec else "built in"
    return {
        "name": name,
        "size": size,
        "license": entry.license,
        "description": entry.description,
        "source": source,
    }


def prepare(
    corpus: CorpusArg, *, tokenizer: str = "bpe:2048", cache: Path | None = None, json: bool = False
) -> None:
    """Tokenize a corpus into the cache, or find it there.

    examples:
      qkflow data prepare speeches
      qkflow data prepare my_texts/ --tokenizer bpe:8192
      qkflow data prepare 'notes/*.jsonl.gz#body' --tokenizer bytes
      qkflow data prepare hf:Salesforce/wikitext:wikitext-103-raw-v1 --tokenizer hf:gpt2

    Args:
        corpus: a name of `qkflow data list`, a path, or hf:owner/name:config.
        tokenizer: bytes, bpe:SIZE (trained on the train split), a path, or hf:NAME.
        cache: folder of prepared corpora; default $QKFLOW_CACHE or the user's cache folder.
        json: print one JSON object instead of a table.
    """
    description = pipeline.prepare(corpus, tokenizer, cache_dir=cache).describe()
    if json:
        console.emit_json(description)
        return
    _print_splits(description)
    _print_plain(f"{description['folder']}  {description['fingerprint']}")


def describe(
    corpus: CorpusArg, *, tokenizer: str = "bpe:2048", cache: Path | None = None, json: bool = False
) -> None:
    """Print statistics of a corpus: documents, tokens, bytes, entropy, repetition.

    examples:
      qkflow data describe speeches
      qkflow data describe patterns:repeat=0.5,topics=4,seed=1
      qkflow data describe my_texts/ --tokenizer bytes --json

    Args:
        corpus: a name of `qkflow data list`, a path, or hf:owner/name:config.
        tokenizer: bytes, bpe:SIZE (trained on the train split), a path, or hf:NAME.
        cache: folder of prepared corpora; default $QKFLOW_CACHE or the user's cache folder.
        json: print one JSON object instead of tables.
    """
    from qkflow.data.stats import DISTANCES, compute_stats

    stats = compute_stats(pipeline.prepare(corpus, tokenizer, cache_dir=cache))
    if json:
        console.emit_json(stats)
        return
    _print_splits(stats)
    repetition = stats["repetition"]
    rows = {
        "tokenizer": f"{stats['tokenizer']['spec']}, {stats['tokenizer']['vocab_size']:,} tokens",
        "unigram entropy": f"{stats['unigram_entropy_bits']:.3f} bits per token",
        "vocabulary used": f"{stats['vocab_used']:.1%}",
        f"seen in the last {repetition['lookback_tokens']} tokens": f"{repetition['seen']:.1%} of tokens",
        "seen in the last 8, 32, 128 tokens": ", ".join(
            f"{repetition[f'seen_within_{bound}']:.1%}" for bound in DISTANCES[:-1]
        ),
        "topic": f"the first half of a document saves {stats['topic_bits']:.3f} bits per token on the second",
        "induction accuracy, one token matched": f"{repetition['induction_1']:.1%}",
        "induction accuracy, two tokens matched": f"{repetition['induction_2']:.1%}",
        "duplicate documents": f"{stats['duplicate_documents']:.1%}",
        "license": stats["corpus"]["license"],
        "fingerprint": stats["fingerprint"],
    }
    if left_out := stats["corpus"].get("left_out"):
        rows["files left out"] = "\n".join(left_out)
    _print_table(["statistic (train split)", "value"], [list(row) for row in rows.items()])


def verify(
    corpus: CorpusArg, *, tokenizer: str = "bpe:2048", cache: Path | None = None, json: bool = False
) -> None:
    """Check every byte of a prepared corpus against its checksums, and prepare it again if it is corrupt.

    examples:
      qkflow data verify speeches
      qkflow data verify my_texts/ --tokenizer bpe:8192 --json

    Args:
        corpus: a name of `qkflow data list`, a path, or hf:owner/name:config.
        tokenizer: the tokenizer it was prepared with.
        cache: folder of prepared corpora; default $QKFLOW_CACHE or the user's cache folder.
        json: print one JSON object instead of a line.
    """
    tokens, corrupted = pipeline.verify(corpus, tokenizer, cache_dir=cache)
    if json:
        console.emit_json({"corpus": corpus, "corrupted": corrupted, "fingerprint": tokens.fingerprint})
        return
    result = f"corrupt, prepared again: {'; '.join(corrupted)}" if corrupted else "all checksums match"
    _print_plain(f"{corpus}: {result} ({tokens.fingerprint})")


def _print_plain(text: str) -> None:
    """Print a line without markup: a path may contain brackets."""
    console.out.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_splits(description: dict[str, Any]) -> None:
    rows = [
        [split, *(f"{counts[key]:,}" for key in ("documents", "tokens", "bytes")), _tokens_per_byte(counts)]
        for split, counts in description["splits"].items()
    ]
    _print_table(
        ["split", "documents", "tokens", "bytes", "tokens per byte"],
        rows,
        description["name"],
        right_align=True,
    )


def _tokens_per_byte(counts: dict[str, int]) -> str:
    return f"{counts['tokens'] / counts['bytes']:.4f}" if counts["bytes"] else "-"


def _print_table(
    columns: list[str], rows: list[list[str]], title: str | None = None, *, right_align: bool = False
) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title) if title else None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if right_align and number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.out.print(table)
