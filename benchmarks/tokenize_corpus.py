"""Speed of tokenizing a corpus: with and without the word cache, and `tokenizers` alone on the same text.

    python benchmarks/tokenize_corpus.py                        # the built-in speeches
    python benchmarks/tokenize_corpus.py my.txt --tokenizer path/to/tokenizer.json --rounds 9
    taskset -c 0 python benchmarks/tokenize_corpus.py           # one core

`prepare` is what `qkflow data prepare` does with an empty cache: hash and read the files, train a `bpe:SIZE`,
assign splits, encode, write token files and checksums. `tokenize_corpus` is the same without the training.
`tokenizers` gets the documents in memory, and its result is discarded. Variants are interleaved. Printed are
the median speeds, and the median and range over rounds of the time of each variant relative to `prepare`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from qkflow.data import corpora, prepare, splits
from qkflow.data import tokenizer as tokenizers
from qkflow.data.bpe_cache import use_bpe_cache
from qkflow.data.pipeline import tokenize_corpus
from qkflow.data.readers.files import ReadProgress
from qkflow.data.token_set import TokenSetWriter
from qkflow.system import process_cpu_count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", nargs="?", default="speeches")
    parser.add_argument("--tokenizer", default="bpe:2048")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    source = corpora.resolve(options.corpus)
    documents = list(splits.assign_splits(source.iter_documents(ReadProgress()), source.name))
    times = measure(build_variants(options.corpus, options.tokenizer, documents), options.rounds)
    megabytes = sum(document.n_bytes for document in documents) / 1e6
    report = {name: summarize(taken, times["prepare"], megabytes) for name, taken in times.items()}
    if options.json:
        cores = process_cpu_count()
        print(json.dumps({"corpus": options.corpus, "megabytes": megabytes, "cores": cores, **report}))
        return
    print(f"{options.corpus}: {megabytes:.1f} MB, {options.tokenizer}, {process_cpu_count()} cores")
    for name, row in report.items():
        ratio = row["time_relative_to_prepare"]
        print(
            f"{name:30} {row['megabytes_per_second']:7.2f} MB/s   {ratio['median']:.2f}x the time of prepare "
            f"({ratio['low']:.2f} to {ratio['high']:.2f} over {options.rounds} rounds)"
        )


def build_variants(
    corpus: str, spec: str, documents: list[splits.Document]
) -> dict[str, Callable[[], object]]:
    vocab_size = tokenizers.bpe_vocab_size(spec)
    train = (document.text for document in documents if document.split == "train")
    tokenizer = tokenizers.train_bpe(train, vocab_size) if vocab_size else tokenizers.load_tokenizer(spec)
    texts = [document.text for document in documents]

    def tokenize() -> None:
        fresh = tokenizers.tokenizer_from_str(tokenizer.to_str(), tokenizer.eos_token_id)  # an empty cache
        with tempfile.TemporaryDirectory() as folder, TokenSetWriter(Path(folder), fresh) as writer:
            tokenize_corpus(corpora.resolve(corpus), fresh, writer, ReadProgress())
            writer.finalize({"name": corpus}, spec)

    def prepare_with(cached: bool) -> None:
        with use_bpe_cache(cached), tempfile.TemporaryDirectory() as folder:
            prepare(corpus, spec, cache_dir=Path(folder), show_progress=False)

    variants: dict[str, Callable[[], object]] = {
        "prepare": lambda: prepare_with(True),
        "prepare, no word cache": lambda: prepare_with(False),
        "tokenize_corpus": tokenize,
    }
    if isinstance(tokenizer, tokenizers.HuggingFaceTokenizer):
        backend = tokenizer.backend_tokenizer
        variants["tokenizers encode_batch"] = lambda: backend.encode_batch(texts, add_special_tokens=False)
        variants["tokenizers encode_batch_fast"] = lambda: backend.encode_batch_fast(
            texts, add_special_tokens=False
        )
    return variants


def measure(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Run all variants in turn, `rounds` times after a warm-up; return their seconds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def summarize(taken: list[float], baseline: list[float], megabytes: float) -> dict[str, Any]:
    ratios = sorted(seconds / reference for seconds, reference in zip(taken, baseline, strict=True))
    return {
        "megabytes_per_second": megabytes / median(taken),
        "time_relative_to_prepare": {"median": median(ratios), "low": ratios[0], "high": ratios[-1]},
    }


if __name__ == "__main__":
    main()
