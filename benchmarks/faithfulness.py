"""Time batched faithfulness against its reference on 1,000 texts, interleaved in one process.

    python benchmarks/faithfulness.py [--texts 1000] [--rounds 5]

The texts have the lengths of HateXplain (about 23 tokens, at most 128) and the model the shape of the study:
one layer, four heads of 64, dim 64, MLP 256, vocabulary 30,522. Both variants measure the same texts in every
round. The ratio is printed only if their results agree.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import Tensor, nn

from qkflow.measures.faithfulness import Text, measure_faithfulness, measure_faithfulness_reference


class OneLayer(nn.Module):
    """Embedding, one attention block with an MLP, and a classifier at the last token.

    Only the attention row of the readout position is computed.
    """

    def __init__(self, vocab_size: int = 30_522, dim: int = 64, n_heads: int = 4, head_dim: int = 64) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(256, dim)
        self.q_proj = nn.Linear(dim, n_heads * head_dim)
        self.k_proj, self.v_proj = nn.Linear(dim, n_heads * head_dim), nn.Linear(dim, n_heads * head_dim)
        self.o_proj = nn.Linear(n_heads * head_dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 256), nn.GELU(), nn.Linear(256, dim))
        self.head = nn.Linear(dim, 3)

    def readout_positions(self, attention_mask: Tensor) -> Tensor:
        return attention_mask.sum(-1) - 1

    def probabilities_and_attentions(
        self, ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        last = x[torch.arange(len(x)), self.readout_positions(attention_mask)]
        projected = (self.q_proj(last), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in projected)
        scores = torch.einsum("bhd,bthd->bht", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~attention_mask[:, None], -torch.inf).softmax(-1)
        last = last + self.o_proj(torch.einsum("bht,bthd->bhd", weights, v).flatten(-2))
        return self.head(last + self.mlp(last)).softmax(-1), [weights[:, :, None]]

    def probabilities(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.probabilities_and_attentions(ids, attention_mask)[0]


def texts_like_hatexplain(n_texts: int, seed: int = 0) -> list[Text]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.gamma(2.5, 23.5 / 2.5, n_texts).round().astype(int), 2, 128)
    return [
        Text(str(index), rng.integers(1, 30_522, n).tolist(), [(rng.random(n) < 0.25).tolist()])
        for index, n in enumerate(lengths)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = OneLayer().eval()
    texts = texts_like_hatexplain(arguments.texts)
    variants = {"batched": measure_faithfulness, "reference": measure_faithfulness_reference}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        results = {}
        for name, measure in variants.items():
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            results[name] = measure(model, texts)
            wall[name].append(time.perf_counter() - wall_start)
            cpu[name].append(time.process_time() - cpu_start)
        difference = np.nanmax(np.abs(results["batched"].mass - results["reference"].mass))
        drops = [results[name].comprehensiveness[5.0] for name in variants]
        if max(difference, np.abs(drops[0] - drops[1]).max()) > 1e-4:
            raise SystemExit("the variants disagree: no ratio is reported")
    for clock, seconds in (("wall-clock", wall), ("CPU", cpu)):
        ratios = np.array(seconds["reference"]) / np.array(seconds["batched"])
        spread = f"{ratios.min():.1f}–{ratios.max():.1f}"
        print(
            f"{clock}: batched {np.median(seconds['batched']):.2f} s, reference "
            f"{np.median(seconds['reference']):.2f} s, ratio {np.median(ratios):.1f} ({spread})"
        )


if __name__ == "__main__":
    main()
