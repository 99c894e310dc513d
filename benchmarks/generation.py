"""How fast cached generation is, beside `generate` of `transformers`.

    python benchmarks/generation.py
    python benchmarks/generation.py --preset tiny --tokens 400 --threads 2

Both continue the same prompt with the same weights, one sequence, the likeliest token each time, taking turns
in one process; that they make the same tokens is checked. Printed are tokens a second and how many times as
fast qkflow is, the median and the range over rounds. What qkflow prepares for a call is part of its time.
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
        "--clock", choices=["wall", "process"], default="wall", help="process: a busy machine's"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "process" else time.perf_counter

    # a fan-in start, so that the likeliest token is one by a margin
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
    made = [generate() for generate in variants.values()]
    same = int((made[0] == made[1]).sum()) / made[0].numel()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(options.rounds):
        for name in variants if turn % 2 else reversed(variants):
            start = clock()
            variants[name]()
            times[name].append(clock() - start)
    speeds = {name: new / statistics.median(taken) for name, taken in times.items()}
    ratios = sorted(b / a for a, b in zip(times["qkflow"], times["transformers"], strict=True))
    report = {
        "preset": options.preset, "tokens": new, "threads": options.threads, "same_tokens": same,
        "tokens_per_second": speeds,
        "qkflow_times_as_fast": {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]},
    }  # fmt: skip
    if options.json:
        print(json.dumps(report))
        return
    print(f"{options.preset}, batch 1, {new} tokens after {options.prompt}: {same:.0%} of them the same")
    for name, speed in speeds.items():
        print(f"  {name:13} {speed:7.1f} tokens/s")
    print(
        f"  qkflow is {statistics.median(ratios):.2f}x as fast ({ratios[0]:.2f} to {ratios[-1]:.2f} "
        f"over {options.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
