"""Faithfulness of 1,000 posts: batched over deletions against one by one, interleaved in one process.

    python benchmarks/faithfulness.py [--posts 1000] [--rounds 5]

The posts have the lengths of HateXplain's (about 23 tokens, at most 128) and the model the study's shape: one
layer, four heads of 64, width 64, MLP 256, a vocabulary of 30,522. Both variants measure the same posts in
every round; the ratio is printed only if they agree.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import Tensor, nn

from qkflow.measures.faithfulness import Text, measure_faithfulness, measure_faithfulness_reference


class OneLayer(nn.Module):
    """Embedding, one attention block with its MLP, and a class read at the last real token.

    Nothing is computed that the class does not depend on: of the one layer, only the row that is read.
    """

    def __init__(self, vocabulary: int = 30_522, width: int = 64, heads: int = 4, size: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(256, width)
        self.query = nn.Linear(width, heads * size)
        self.key, self.value = nn.Linear(width, heads * size), nn.Linear(width, heads * size)
        self.out = nn.Linear(heads * size, width)
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))
        self.head = nn.Linear(width, 3)

    def read(self, mask: Tensor) -> Tensor:
        return mask.sum(-1) - 1

    def attend(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        last = x[torch.arange(len(x)), self.read(mask)]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)) for part in (self.query(last), self.key(x), self.value(x))
        )
        scores = torch.einsum("bhd,bthd->bht", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        last = last + self.out(torch.einsum("bht,bthd->bhd", weights, v).flatten(-2))
        return self.head(last + self.mlp(last)).softmax(-1), [weights[:, :, None]]

    def probabilities(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.attend(ids, mask)[0]


def posts_like_hatexplain(number: int, seed: int = 0) -> list[Text]:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.gamma(2.5, 23.5 / 2.5, number).round().astype(int), 2, 128)
    return [
        Text(str(index), random.integers(1, 30_522, n).tolist(), [(random.random(n) < 0.25).tolist()])
        for index, n in enumerate(lengths)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--posts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = OneLayer().eval()
    posts = posts_like_hatexplain(arguments.posts)
    variants = {"batched": measure_faithfulness, "one by one": measure_faithfulness_reference}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        found = {}
        for name, contestant in variants.items():
            start, busy = time.perf_counter(), time.process_time()
            found[name] = contestant(model, posts)
            wall[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - busy)
        difference = np.nanmax(np.abs(found["batched"].mass - found["one by one"].mass))
        drops = [found[name].comprehensiveness[5.0] for name in variants]
        if max(difference, np.abs(drops[0] - drops[1]).max()) > 1e-4:
            raise SystemExit("the variants disagree: no ratio to report")
    for clock, seconds in (("wall-clock", wall), ("processor", processor)):
        ratios = np.array(seconds["one by one"]) / np.array(seconds["batched"])
        spread = f"{ratios.min():.1f}–{ratios.max():.1f}"
        print(
            f"{clock}: batched {np.median(seconds['batched']):.2f} s, one by one "
            f"{np.median(seconds['one by one']):.2f} s, ratio {np.median(ratios):.1f} ({spread})"
        )


if __name__ == "__main__":
    main()
