"""Peak memory of a training step with chunked cross-entropy, beside the same step with full logits.

    python benchmarks/memory.py                            # 60m, vocab_size 50,257, seq_len 512, batch_size 8
    python benchmarks/memory.py --preset small --batch-size 4 --seq-len 256

Each variant runs one step (forward, backward, AdamW) in its own process. The output is the peak resident set
size of the process minus its value before the model was built, and the estimate of `training.memory`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys


def measure_step(options: argparse.Namespace) -> int:
    """Run one step. Return the bytes it added to the peak memory of this process."""
    import torch

    from qkflow.models import Decoder, preset
    from qkflow.models.loss import linear_cross_entropy, linear_cross_entropy_reference
    from qkflow.system import peak_memory
    from qkflow.training.optimizer import AdamW, parameter_groups

    torch.set_num_threads(options.threads)
    warm = torch.randn(64, 64, requires_grad=True)  # allocate the buffers of the libraries first
    (warm @ warm).sum().backward()
    before = peak_memory(warm.device)
    model = Decoder(preset(options.preset), seed=0)
    optimizer = AdamW(parameter_groups(model, 1e-3, 0.1))
    ids = torch.randint(model.config.vocab_size, (options.batch_size, options.seq_len + 1))
    loss = {"chunked": linear_cross_entropy, "full logits": linear_cross_entropy_reference}[options.only]
    loss(model(ids[:, :-1]), model.output_weight, ids[:, 1:]).backward()
    optimizer.step()
    return peak_memory(warm.device) - before


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
        print(measure_step(options))
        return
    peaks = {}
    for name in ("full logits", "chunked"):
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--only", name], stdout=subprocess.PIPE
        )
        done.check_returncode()
        peaks[name] = int(done.stdout)

    from qkflow.models import preset
    from qkflow.training.memory import estimate_training_memory

    estimate = estimate_training_memory(preset(options.preset), options.batch_size, options.seq_len)
    ratio = peaks["chunked"] / peaks["full logits"]
    if options.json:
        print(json.dumps({"bytes": peaks, "ratio": ratio, "estimate": estimate.peak}))
        return
    print(f"{options.preset}, batch_size {options.batch_size}, seq_len {options.seq_len}: peak of one step")
    for name, size in peaks.items():
        print(f"  {name:12} {size / 1e6:8.0f} MB")
    print(f"  chunked / full logits: {ratio:.2f}; estimate for chunked: {estimate.peak / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
