"""Speed of generation with a KV cache, beside `generate` of `transformers`.

    python benchmarks/generation.py
    python benchmarks/generation.py --preset tiny --tokens 400 --threads 2

Both continue the same prompt with the same weights, one sequence, greedily, alternating in one process.
Printed: share of equal tokens, tokens per second, speedup of qkflow (median and range over rounds). The time
of qkflow includes preparing its weights for inference in every call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from peers import llama

from qkflow.models import Decoder, preset
from qkflow.models.generate import generate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="small")
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=["wall", "process"], default="wall", help="process: CPU time, for a busy machine"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "process" else time.perf_counter

    # init="fan_in": larger logits, so that rounding does not change the argmax
    model = Decoder(preset(options.preset, feed_forward="swiglu", init="fan_in"), seed=0).eval()
    peer = llama(model, options.prompt + options.tokens).eval()
    ids = torch.randint(
        model.config.vocab_size, (1, options.prompt), generator=torch.Generator().manual_seed(0)
    )
    new = options.tokens
    variants: dict[str, Callable[[], torch.Tensor]] = {
        "qkflow": lambda: generate(model, ids, new, temperature=0),
        "transformers": lambda: peer.generate(
            ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        ),
    }
    outputs = [run() for run in variants.values()]
    same = int((outputs[0] == outputs[1]).sum()) / outputs[0].numel()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(options.rounds):
        for name in variants if round_number % 2 else reversed(variants):
            start_time = clock()
            variants[name]()
            times[name].append(clock() - start_time)
    speeds = {name: new / statistics.median(seconds) for name, seconds in times.items()}
    ratios = sorted(b / a for a, b in zip(times["qkflow"], times["transformers"], strict=True))
    report = {
        "preset": options.preset, "tokens": new, "threads": options.threads, "same_tokens": same,
        "tokens_per_second": speeds,
        "speedup": {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]},
    }  # fmt: skip
    if options.json:
        print(json.dumps(report))
        return
    print(f"{options.preset}, batch 1, {new} tokens after {options.prompt}: {same:.0%} equal")
    for name, speed in speeds.items():
        print(f"  {name:13} {speed:7.1f} tokens/s")
    print(
        f"  speedup of qkflow {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f} "
        f"over {options.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
