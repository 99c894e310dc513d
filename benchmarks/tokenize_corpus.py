"""How fast a corpus is tokenized, beside what `tokenizers` alone does with the same text on all cores.

    python benchmarks/tokenize_corpus.py                        # the built-in speeches
    python benchmarks/tokenize_corpus.py my.txt --tokenizer path/to/tokenizer.json --rounds 9

`tokenizers` gets the documents in memory and its work is thrown away; qkflow reads the files, divides them
into splits, encodes, and writes token files with their checksums. The variants take turns; printed are the
medians, and the median and range over rounds of qkflow's speed as a multiple of each of the others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from qkflow.data import corpora, pipeline, splits
from qkflow.data import tokenizer as tokenizers
from qkflow.data.readers.files import ReadProgress
from qkflow.data.token_set import TokenSetWriter


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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
    texts = [document.text for document in documents]
    size = tokenizers.bpe_vocab_size(options.tokenizer)
    train = (document.text for document in documents if document.split == "train")
    trained = tokenizers.train_bpe(train, size) if size else tokenizers.load_tokenizer(options.tokenizer)
    state, end = trained.to_str(), trained.eos_token_id

    def ours() -> None:
        # A tokenizer of its own each time, so that no round profits from what an earlier one remembered.
        fresh = tokenizers.tokenizer_from_str(state, end)
        with tempfile.TemporaryDirectory() as folder, TokenSetWriter(Path(folder), fresh) as writer:
            pipeline.tokenize_corpus(source, fresh, writer, ReadProgress())
            writer.finalize({"name": source.name}, options.tokenizer)

    def alone(method: str) -> Callable[[], object]:
        fresh = tokenizers.tokenizer_from_str(state, end)
        assert isinstance(fresh, tokenizers.HuggingFaceTokenizer)
        return lambda: getattr(fresh.backend_tokenizer, method)(texts, add_special_tokens=False)

    variants = {
        "qkflow, from files to files": ours,
        "tokenizers encode_batch": alone("encode_batch"),
        "tokenizers encode_batch_fast": alone("encode_batch_fast"),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, work in variants.items():
            times[name].append(seconds(work))

    megabytes = sum(document.n_bytes for document in documents) / 1e6
    own = times["qkflow, from files to files"]
    report = {}
    for name, taken in times.items():
        ratios = sorted(other / mine for other, mine in zip(taken, own, strict=True))
        report[name] = {
            "megabytes_per_second": megabytes / median(taken),
            "qkflow_times_as_fast": {"median": median(ratios), "low": ratios[0], "high": ratios[-1]},
        }
    if options.json:
        print(
            json.dumps(
                {
                    "corpus": options.corpus,
                    "megabytes": megabytes,
                    "cores": tokenizers.process_cpu_count(),
                    **report,
                }
            )
        )
        return
    print(
        f"{options.corpus}: {megabytes:.1f} MB, {options.tokenizer}, {tokenizers.process_cpu_count()} cores"
    )
    for name, row in report.items():
        ratio = row["qkflow_times_as_fast"]
        print(
            f"{name:30} {row['megabytes_per_second']:7.2f} MB/s   qkflow is {ratio['median']:.2f}x as fast "
            f"({ratio['low']:.2f} to {ratio['high']:.2f} over {options.rounds} rounds)"
        )


if __name__ == "__main__":
    main()
