"""Attention trained on the controlled task in count space: the same gradients, none of the tokens.

The model is one attention head without positions, residual, MLP, norm or bias: scores qᵀW_QK·k/√50, output
W_OV·Σ aₜxₜ, one-hot inputs. Tokens with the same id get the same score, so with counts n and scores s of the
query's row,

    p_j = n_j·e^{s_j} / Σ n_l·e^{s_l}        logits = W_OV · p        (p_j: attention on all tokens with id j)

and only the four query rows of W_QK ever act or learn. Gradients are written out, since each is one small
product:

    G = softmax(logits) − truth        ∂L/∂W_OV = Gᵀp / B        ∂L/∂s = p ⊙ (GW_OV − ⟨p, GW_OV⟩) / B

Runs that share a parameterisation and length are lanes of one batched computation, each with its own learning
rates and seed. Runs of one seed share their start, where the start is the same, and every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkflow.errors import InputError, unknown
from qkflow.papers.faster_qk.batched_circuits import (
    Circuit,
    CollapsedCircuit,
    FactorisedCircuit,
    identity_init,
    uniform_init,
)
from qkflow.papers.faster_qk.controlled_task import (
    FIRST_LABEL_ID,
    FIRST_QUERY_ID,
    N_CLASSES,
    N_COMMON,
    VOCAB_SIZE,
    BatchStream,
)
from qkflow.papers.faster_qk.reduced_flow import KINDS

BIN_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # bins of the heatmap, on both axes
LOSS_WINDOW = 250  # steps over which the stop rule averages the loss
INITS = ("identity", "uniform")
_SCORE_SCALE = VOCAB_SIZE**-0.5
_LABELS = slice(FIRST_LABEL_ID, FIRST_LABEL_ID + N_CLASSES)
_QUERIES = slice(FIRST_QUERY_ID, FIRST_QUERY_ID + N_CLASSES)


@dataclass(frozen=True)
class SyntheticConfig:
    """One cell of the figure: parameterisation, learning rates η_QK and η_OV, and how long it trains.

    η_QK grows as η_QK·[1 + (growth − 1)·step/steps]. Training stops after `steps`, or once the loss averaged
    over 250 steps is at most `stop_loss`. A circuit starts at 1e-6·I (identity) or U(±1/√50) (uniform), in
    every factor.
    """

    name: str
    kind: str
    qk_lr: float = 0.01
    ov_lr: float = 0.01
    length: int = 64
    steps: int = 200_000
    growth: float = 1.0
    stop_loss: float = 0.0
    qk_init: str = "identity"
    ov_init: str = "identity"
    batch: int = 32
    published: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("setting", self.kind, KINDS)
        for start in (self.qk_init, self.ov_init):
            if start not in INITS:
                raise unknown("init", start, INITS)
        for name in ("qk_lr", "ov_lr", "steps", "growth"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be positive, not {getattr(self, name)}")
        BatchStream(0, self.length, self.batch)  # refuses what it cannot draw

    @property
    def batching_key(self) -> tuple[str, int, int]:
        """Settings of equal shape train as lanes of one computation."""
        return self.kind, self.length, self.batch


# The settings of the published figure, with steps, stop rule and starts as in the authors' notebooks, and the
# rows their notebooks print: % of instances by attention on distinct tokens, bins of 0.2, all with p(truth) ≥
# 0.8.
FIGURE_CONFIGS = (
    SyntheticConfig("FAFO .01/.01", "FAFO", 0.01, 0.01, 64, 625_000, stop_loss=1e-3, qk_init="uniform",
            published=(0.1, 64.1, 35.7, 0.0, 0.0)),
    SyntheticConfig("FACO .01/.01", "FACO", 0.01, 0.01, 64, 625_000, stop_loss=1e-3,
            published=(0.0, 0.0, 0.0, 5.4, 94.6)),
    SyntheticConfig("FAFO .2/.01", "FAFO", 0.2, 0.01, 64, 100_000, stop_loss=1e-3),
    SyntheticConfig("FAFO .01→.4/.01", "FAFO", 0.01, 0.01, 64, 200_000, growth=40),
    SyntheticConfig("CACO .05/.01", "CACO", 0.05, 0.01, 128, 200_000, qk_init="uniform", ov_init="uniform",
            published=(0.0, 0.0, 2.3, 76.8, 20.8)),
    SyntheticConfig("CACO .01→.1/.01", "CACO", 0.01, 0.01, 128, 200_000, growth=10, qk_init="uniform",
            ov_init="uniform", published=(0.0, 0.0, 2.6, 86.9, 10.5)),
)  # fmt: skip


# What a single cell takes from its kind, as in the authors' notebooks (of CAFO and of CACO at T = 64 they
# show no result).
_DEFAULT_CONFIGS = {
    "FAFO": FIGURE_CONFIGS[0],
    "FACO": FIGURE_CONFIGS[1],
    "CAFO": SyntheticConfig("", "CAFO", steps=1_000_000, stop_loss=1e-3),
    "CACO": SyntheticConfig("", "CACO", steps=500_000, stop_loss=1e-3, qk_init="uniform", ov_init="uniform"),
}


def synthetic_config(
    kind: str,
    qk_lr: float = 0.01,
    ov_lr: float = 0.01,
    length: int = 64,
    growth: float = 1.0,
    **overrides: Any,
) -> SyntheticConfig:
    """One setting by kind, rates and length: the figure's if it has one, else new; `others` override."""
    if kind not in KINDS:
        raise unknown("setting", kind, KINDS)
    asked: dict[str, Any] = {"kind": kind, "qk_lr": qk_lr, "ov_lr": ov_lr, "length": length, "growth": growth}
    for known in FIGURE_CONFIGS:
        if all(getattr(known, name) == value for name, value in asked.items()):
            changed = {name: value for name, value in overrides.items() if value != getattr(known, name)}
            return replace(known, **changed, published=None) if changed else known
    rate = f"{qk_lr:g}→{qk_lr * growth:g}" if growth != 1 else f"{qk_lr:g}"
    return replace(
        _DEFAULT_CONFIGS[kind], name=f"{kind} {rate}/{ov_lr:g}", published=None, **asked, **overrides
    )


@dataclass
class SyntheticResult:
    """What one run came to, on fresh instances."""

    config: SyntheticConfig
    seed: int
    steps: int
    loss: float
    mean_distinct_attention: float
    mean_query_attention: float  # on the query's own id, which names the class as well
    heatmap: np.ndarray = field(repr=False)  # % of instances, [attention bin, probability bin]

    @property
    def attention_histogram(self) -> np.ndarray:
        """% of instances by attention on distinct tokens."""
        return self.heatmap.sum(axis=1)


def build_circuits(
    configs: Sequence[SyntheticConfig], seeds: Sequence[int], dtype: torch.dtype
) -> tuple[Circuit, Circuit]:
    """The QK and OV circuits of the lanes at their starts; QK keeps the four rows that queries select.

    Uniform starts draw K, Q, V, O (or W_QK, W_OV) in this order from the lane's seed, every one of them
    whatever the start, so that lanes of one seed start alike.
    """
    kind, lanes = configs[0].kind, len(configs)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def matrix(start: str) -> Tensor:
        drawn = uniform_init(generators, VOCAB_SIZE, VOCAB_SIZE, dtype=dtype)
        lane_starts = [getattr(each, start) for each in configs]
        chosen = torch.tensor([name == "uniform" for name in lane_starts])[:, None, None]
        return torch.where(chosen, drawn, identity_init(lanes, dtype))

    qk: Circuit
    if kind.startswith("FA"):
        key, query = matrix("qk_init"), matrix("qk_init")
        qk = FactorisedCircuit(query[:, :, _QUERIES].mT.contiguous(), key)
    else:
        qk = CollapsedCircuit(matrix("qk_init")[:, _QUERIES].contiguous())
    if kind.endswith("FO"):
        value, output = matrix("ov_init"), matrix("ov_init")
        return qk, FactorisedCircuit(output, value)
    return qk, CollapsedCircuit(matrix("ov_init"))


def attention_by_id(counts: Tensor, classes: Tensor, scores: Tensor) -> Tensor:
    """p, the attention on each id: (lanes, B, 50), from counts, classes and query rows (lanes, 4, 50)."""
    strength = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = torch.bmm(classes, strength).mul_(counts)
    return weights.div_(weights.sum(-1, keepdim=True))


def gradients(
    counts: Tensor, classes: Tensor, scores: Tensor, ov_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """p(truth) of every instance, (lanes, B), and B times ∂L/∂scores and ∂L/∂matrix, which is W_OV."""
    attention = attention_by_id(counts, classes, scores)
    error = torch.softmax(torch.bmm(attention, ov_weight.mT), -1)
    labels = error[..., _LABELS]  # labels follow classes in order: a view, not a gather
    truth = (labels * classes).sum(-1)
    labels.sub_(classes)
    by_matrix = torch.bmm(error.mT, attention)
    pull = torch.bmm(error, ov_weight).mul_(attention)
    pull.sub_(attention.mul_(pull.sum(-1, keepdim=True)))
    return truth, torch.bmm(classes.mT, pull), by_matrix


def train_synthetic(
    configs: Sequence[SyntheticConfig],
    seeds: Sequence[int],
    on_progress: Callable[[int], None] = lambda steps: None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[SyntheticResult]:
    """Train every setting, all of one `shape`, with every seed; `advance` hears how many steps lanes took."""
    if len({each.batching_key for each in configs}) != 1:
        raise InputError("settings trained together must agree in parameterisation, length and batch")
    _, length, batch = configs[0].batching_key
    lanes = [(setting, seed) for setting in configs for seed in seeds]
    streams = [BatchStream(seed, length, batch) for seed in seeds]
    stream_of = torch.tensor([index for _ in configs for index in range(len(seeds))], device=device)
    with torch.inference_mode():
        qk, ov = build_circuits([setting for setting, _ in lanes], [seed for _, seed in lanes], dtype)
        for circuit in (qk, ov):
            _to_device(circuit, device)
        finished: list[SyntheticResult] = []
        done = 0
        while lanes:
            steps = min(LOSS_WINDOW, min(setting.steps for setting, _ in lanes) - done)
            batches = [stream.next_batches(steps, dtype) for stream in streams]
            losses = _train_window(qk, ov, [setting for setting, _ in lanes], batches, stream_of, done)
            done += steps
            on_progress(steps * len(lanes))
            ended = [
                s.steps <= done or loss <= s.stop_loss for (s, _), loss in zip(lanes, losses, strict=True)
            ]
            if any(ended):
                final = zip(lanes, qk.value().cpu() * _SCORE_SCALE, ov.value().cpu(), ended, strict=True)
                finished += [_evaluate(*lane, done, scores, w) for lane, scores, w, end in final if end]
                on_progress(sum(s.steps - done for (s, _), end in zip(lanes, ended, strict=True) if end))
                going = [index for index, end in enumerate(ended) if not end]
                lanes = [lanes[index] for index in going]
                kept = torch.tensor(going, dtype=torch.long, device=device)
                stream_of = stream_of[kept]
                qk.select_runs(kept)
                ov.select_runs(kept)
    return sorted(finished, key=lambda each: (configs.index(each.config), seeds.index(each.seed)))


def _train_window(
    qk: Circuit,
    ov: Circuit,
    configs: list[SyntheticConfig],
    batches: list[tuple[Tensor, Tensor]],
    stream_index: Tensor,
    steps_done: int,
) -> list[float]:
    """Train all lanes on a chunk of batches, one per seed; return each lane's mean loss."""
    counts = torch.stack([counts for counts, _ in batches], 1).to(stream_index.device)
    classes = torch.stack([classes for _, classes in batches], 1).to(stream_index.device)
    steps, batch = counts.shape[0], counts.shape[2]

    def per_lane(values: list[float]) -> Tensor:
        return counts.new_tensor(values)[:, None, None]

    rate_ov = per_lane([each.ov_lr / batch for each in configs])
    growth = per_lane([(each.growth - 1) / each.steps for each in configs])
    elapsed = torch.arange(steps_done, steps_done + steps).to(counts)[:, None, None, None]
    rates_qk = per_lane([each.qk_lr * _SCORE_SCALE / batch for each in configs]) * (1 + growth * elapsed)
    truths = counts.new_empty(steps, len(configs), batch)
    for step in range(steps):
        truths[step], by_scores, by_matrix = gradients(
            counts[step].index_select(0, stream_index),
            classes[step].index_select(0, stream_index),
            qk.value() * _SCORE_SCALE,
            ov.value(),
        )
        qk.sgd_step(by_scores.mul_(rates_qk[step]))
        ov.sgd_step(by_matrix.mul_(rate_ov))
    losses: list[float] = truths.log_().mean((0, 2)).neg_().tolist()
    for setting, value in zip(configs, losses, strict=True):
        if not np.isfinite(value):
            raise InputError(
                f"{setting.name} diverged by step {steps_done + steps}: lower its learning rates"
            )
    return losses


def _to_device(circuit: Circuit, device: str) -> None:
    for name, tensor in vars(circuit).items():
        setattr(circuit, name, tensor.to(device))


def _evaluate(
    config: SyntheticConfig, seed: int, steps: int, scores: Tensor, ov_weight: Tensor
) -> SyntheticResult:
    """Judge one lane on 20,000 instances that training never drew."""
    fresh = BatchStream(seed + 2**32, config.length, 20_000)
    counts, classes = fresh.next_batches(1, torch.float64)
    attention = attention_by_id(counts, classes, scores.double()[None])
    truth = torch.softmax(torch.bmm(attention, ov_weight.double()[None].mT), -1)[..., _LABELS]
    probability = (truth * classes).sum(-1)[0].numpy()
    distinct = attention[0, :, N_COMMON:].sum(-1).numpy()
    query = float((attention[..., _QUERIES] * classes).sum(-1).mean())
    edges = np.array(BIN_EDGES)
    edges[-1] += 1e-9  # attention may round to a hair above 1
    heatmap, _, _ = np.histogram2d(distinct, probability, bins=[edges, edges])
    loss = float(-np.log(probability).mean())
    return SyntheticResult(
        config, seed, steps, loss, float(distinct.mean()), query, 100 * heatmap / len(distinct)
    )
