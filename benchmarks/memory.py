"""How much memory a training step needs with chunked cross-entropy, beside the same step with full logits.

    python benchmarks/memory.py                            # 60m, vocabulary 50,257, T = 512, batch 8
    python benchmarks/memory.py --preset small --batch 4 --seq-len 256

Each contestant makes one step (forward, backward, AdamW) in a process of its own; printed is the most memory
that the process ever held, less what it held before the model was made, and beside it what `accounting` had
foreseen.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys


def peak() -> int:
    """The most bytes this process has held so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def step(options: argparse.Namespace) -> int:
    """Make one step; how many bytes it took."""
    import torch

    from qkflow.models import Decoder, preset
    from qkflow.models.loss import linear_cross_entropy, linear_cross_entropy_reference
    from qkflow.training.optimizer import AdamW, parameter_groups

    torch.set_num_threads(options.threads)
    warm = torch.randn(64, 64, requires_grad=True)  # what the libraries take for themselves is not the step's
    (warm @ warm).sum().backward()
    before = peak()
    model = Decoder(preset(options.preset), seed=0)
    optimizer = AdamW(parameter_groups(model, 1e-3, 0.1))
    ids = torch.randint(model.config.vocab_size, (options.batch, options.length + 1))
    loss = {"chunked": linear_cross_entropy, "full logits": linear_cross_entropy_reference}[options.only]
    loss(model(ids[:, :-1]), model.output_weight, ids[:, 1:]).backward()
    optimizer.step()
    return peak() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="60m")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["chunked", "full logits"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.only:
        print(step(options))
        return
    taken = {}
    for name in ("full logits", "chunked"):
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--only", name], stdout=subprocess.PIPE
        )
        done.check_returncode()
        taken[name] = int(done.stdout)

    from qkflow.models import preset
    from qkflow.models.cost import estimate_training_memory

    foreseen = estimate_training_memory(preset(options.preset), options.batch, options.length)
    ratio = taken["chunked"] / taken["full logits"]
    if options.json:
        print(json.dumps({"bytes": taken, "ratio": ratio, "foreseen": foreseen.total}))
        return
    print(f"{options.preset}, batch {options.batch}, {options.length} tokens: the peak of one training step")
    for name, size in taken.items():
        print(f"  {name:12} {size / 1e6:8.0f} MB")
    print(
        f"  chunked needs {ratio:.2f}x of full logits; accounting had foreseen {foreseen.total / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
