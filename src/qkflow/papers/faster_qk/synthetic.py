"""Attention trained on the controlled task in count space.

The model is one attention head without positions, residual, MLP, norm or bias: scores qᵀW_QK·k/√50, output
W_OV·Σ aₜxₜ, one-hot inputs. Tokens with the same id have the same score, so with counts n and the scores s of
the query's row of W_QK,

    p_j = n_j·e^{s_j} / Σ n_l·e^{s_l}        logits = W_OV·p        (p_j: attention on all tokens with id j)

and only the four query rows of W_QK have an effect or a gradient. The gradients in closed form:

    G = softmax(logits) − target        ∂L/∂W_OV = Gᵀp / B        ∂L/∂s = p ⊙ (GW_OV − ⟨p, GW_OV⟩) / B

Runs with the same parameterization, sequence length and batch size train in one batched computation (axis R
of every tensor), each with its own learning rates and seed. Runs of one seed share the batches and, for the
same kind of init, the initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkflow.errors import InputError, unknown
from qkflow.measures.heatmap import attention_heatmap
from qkflow.papers.faster_qk.batched_circuits import (
    Circuit,
    CollapsedCircuit,
    FactorizedCircuit,
    identity_init,
    uniform_init,
)
from qkflow.papers.faster_qk.controlled_task import LABEL_IDS, N_COMMON, QUERY_IDS, VOCAB_SIZE, BatchStream
from qkflow.papers.faster_qk.reduced_flow import KINDS

EPOCH_STEPS = 250  # 8,000 sequences at batch size 32
EPOCHS_PER_CHECK = 10
INITS = ("identity", "uniform")
_SCORE_SCALE = VOCAB_SIZE**-0.5


@dataclass(frozen=True)
class SyntheticConfig:
    """One setting: parameterization, learning rates η_QK and η_OV, and duration.

    η_QK grows as η_QK·[1 + (growth − 1)·step/steps]. A circuit's init is 1e-6·I (identity) or U(±1/√50)
    (uniform), in every factor. Training ends after `steps`, or earlier by the stop rule: after every tenth
    epoch it ends if the mean loss of that epoch is at most `stop_loss`. An epoch is 250 steps, i.e. 8,000
    sequences at batch size 32; the data is sampled, so an epoch is not a pass over a fixed set.
    """

    name: str
    kind: str
    qk_lr: float = 0.01
    ov_lr: float = 0.01
    seq_len: int = 64
    steps: int = 200_000
    growth: float = 1.0
    stop_loss: float = 0.0
    qk_init: str = "identity"
    ov_init: str = "identity"
    batch_size: int = 32
    published: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("setting", self.kind, KINDS)
        for init in (self.qk_init, self.ov_init):
            if init not in INITS:
                raise unknown("init", init, INITS)
        for name in ("qk_lr", "ov_lr", "steps", "growth"):
            if not getattr(self, name) > 0:
                raise InputError(
                    f"{name} must be positive, not {getattr(self, name)}", code="option-not-positive"
                )
        BatchStream(0, self.seq_len, self.batch_size)  # checks both

    @property
    def batching_key(self) -> tuple[str, int, int]:
        """Configs with equal keys can train in one batched computation."""
        return self.kind, self.seq_len, self.batch_size


# The settings of the published figure, with steps, stop rule and inits of the authors' notebooks. `published`
# is the row their notebooks print: % of instances by attention on distinct tokens, in bins of 0.2.
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

# Steps, stop rule and inits of other settings, by kind and sequence length, as in the authors' notebooks. The
# notebooks print no result for CAFO and for CACO at T = 64.
_DEFAULT_CONFIGS = (
    FIGURE_CONFIGS[0],
    FIGURE_CONFIGS[1],
    SyntheticConfig("", "CAFO", steps=1_000_000, stop_loss=1e-3),
    SyntheticConfig("", "CACO", steps=500_000, stop_loss=1e-3, qk_init="uniform", ov_init="uniform"),
    FIGURE_CONFIGS[4],
)


def synthetic_config(
    kind: str,
    qk_lr: float = 0.01,
    ov_lr: float = 0.01,
    seq_len: int = 64,
    growth: float = 1.0,
    **overrides: Any,
) -> SyntheticConfig:
    """Return the config of the figure with these values if there is one, else a new one.

    A new config has the steps, stop rule and inits that the authors' notebooks use for this kind at the
    nearest sequence length. `overrides` replace any field.
    """
    if kind not in KINDS:
        raise unknown("setting", kind, KINDS)
    values = {"kind": kind, "qk_lr": qk_lr, "ov_lr": ov_lr, "seq_len": seq_len, "growth": growth}
    for config in FIGURE_CONFIGS:
        if all(getattr(config, name) == value for name, value in values.items()):
            changes = {name: value for name, value in overrides.items() if value != getattr(config, name)}
            return replace(config, **changes, published=None) if changes else config
    rate = f"{qk_lr:g}→{qk_lr * growth:g}" if growth != 1 else f"{qk_lr:g}"
    defaults = min(
        (config for config in _DEFAULT_CONFIGS if config.kind == kind),
        key=lambda config: abs(config.seq_len - seq_len),
    )
    changes = {"name": f"{kind} {rate}/{ov_lr:g}", "published": None, **values, **overrides}
    return replace(defaults, **changes)


@dataclass
class SyntheticResult:
    """One trained run, evaluated on held-out instances."""

    config: SyntheticConfig
    seed: int
    steps: int
    loss: float
    mean_distinct_attention: float
    mean_query_attention: float  # on the query's own id, which also determines the class
    heatmap: np.ndarray = field(repr=False)  # % of instances, [attention bin, label probability bin]

    @property
    def attention_histogram(self) -> np.ndarray:
        """% of instances by attention on distinct tokens."""
        return self.heatmap.sum(axis=1)


def build_circuits(
    configs: Sequence[SyntheticConfig], seeds: Sequence[int], dtype: torch.dtype
) -> tuple[Circuit, Circuit]:
    """Build the initial QK (R, 4, 50) and OV (R, 50, 50) circuits; QK has the four query rows only.

    K, Q, V, O (or W_QK, W_OV) are sampled in this order from the run's seed, also where the init is the
    identity, so that runs of one seed share every sampled matrix.
    """
    kind, n_runs = configs[0].kind, len(configs)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def init_matrix(option: str) -> Tensor:
        uniform = uniform_init(generators, VOCAB_SIZE, VOCAB_SIZE, dtype=dtype)
        is_uniform = torch.tensor([getattr(config, option) == "uniform" for config in configs])
        return torch.where(is_uniform[:, None, None], uniform, identity_init(n_runs, dtype))

    qk: Circuit
    if kind.startswith("FA"):
        key, query = init_matrix("qk_init"), init_matrix("qk_init")
        qk = FactorizedCircuit(query[:, :, QUERY_IDS].mT.contiguous(), key)
    else:
        qk = CollapsedCircuit(init_matrix("qk_init")[:, QUERY_IDS].contiguous())
    if kind.endswith("FO"):
        value, output = init_matrix("ov_init"), init_matrix("ov_init")
        return qk, FactorizedCircuit(output, value)
    return qk, CollapsedCircuit(init_matrix("ov_init"))


def attention_by_id(counts: Tensor, classes: Tensor, scores: Tensor) -> Tensor:
    """Return p (R, B, 50), the attention on each id.

    `counts` (R, B, 50), one-hot `classes` (R, B, 4), `scores` of the query rows (R, 4, 50).
    """
    exp_scores = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = torch.bmm(classes, exp_scores).mul_(counts)
    return weights.div_(weights.sum(-1, keepdim=True))


def gradients(
    counts: Tensor, classes: Tensor, scores: Tensor, ov_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the label probabilities (R, B), B·∂L/∂scores (R, 4, 50) and B·∂L/∂W_OV (R, 50, 50)."""
    attention = attention_by_id(counts, classes, scores)
    error = torch.softmax(torch.bmm(attention, ov_weight.mT), -1)
    labels = error[..., LABEL_IDS]  # label ids are in the order of the classes, so this is a view
    label_probs = (labels * classes).sum(-1)
    labels.sub_(classes)
    ov_grad = torch.bmm(error.mT, attention)
    score_grad = torch.bmm(error, ov_weight).mul_(attention)
    score_grad.sub_(attention.mul_(score_grad.sum(-1, keepdim=True)))
    return label_probs, torch.bmm(classes.mT, score_grad), ov_grad


def train_synthetic(
    configs: Sequence[SyntheticConfig],
    seeds: Sequence[int],
    on_progress: Callable[[int], None] = lambda steps: None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[SyntheticResult]:
    """Train every config with every seed. All configs must have the same `batching_key`.

    `on_progress` receives the number of steps taken, summed over runs; skipped steps of a run that stops
    early are included.
    """
    if len({config.batching_key for config in configs}) != 1:
        raise InputError(
            "configs trained together must have the same kind, seq_len and batch_size",
            code="mixed-config-shapes",
        )
    _, seq_len, batch_size = configs[0].batching_key
    runs = [(config, seed) for config in configs for seed in seeds]
    streams = [BatchStream(seed, seq_len, batch_size) for seed in seeds]
    stream_index = torch.tensor([index for _ in configs for index in range(len(seeds))], device=device)
    results: list[SyntheticResult] = []
    done = 0
    with torch.inference_mode():
        qk, ov = build_circuits([config for config, _ in runs], [seed for _, seed in runs], dtype)
        for circuit in (qk, ov):
            _to_device(circuit, device)
        while runs:
            steps = min(EPOCH_STEPS, min(config.steps for config, _ in runs) - done)
            batches = [stream.next_batches(steps, dtype) for stream in streams]
            losses = _train_epoch(qk, ov, [config for config, _ in runs], batches, stream_index, done)
            done += steps
            on_progress(steps * len(runs))
            finished = [
                _is_finished(config, done, loss) for (config, _), loss in zip(runs, losses, strict=True)
            ]
            if not any(finished):
                continue
            scores, ov_weights = qk.value().cpu() * _SCORE_SCALE, ov.value().cpu()
            for index in (i for i, end in enumerate(finished) if end):
                config, seed = runs[index]
                results.append(_evaluate(config, seed, done, scores[index], ov_weights[index]))
                on_progress(config.steps - done)
            kept = [index for index, end in enumerate(finished) if not end]
            runs = [runs[index] for index in kept]
            kept_index = torch.tensor(kept, dtype=torch.long, device=device)
            stream_index = stream_index[kept_index]
            qk.select_runs(kept_index)
            ov.select_runs(kept_index)
    return sorted(results, key=lambda result: (configs.index(result.config), seeds.index(result.seed)))


def _is_finished(config: SyntheticConfig, step: int, epoch_loss: float) -> bool:
    """Apply the stop rule of `SyntheticConfig` after the epoch that ends at `step`."""
    is_check = step % (EPOCHS_PER_CHECK * EPOCH_STEPS) == 0
    return step >= config.steps or (is_check and epoch_loss <= config.stop_loss)


def _train_epoch(
    qk: Circuit,
    ov: Circuit,
    configs: list[SyntheticConfig],
    batches: list[tuple[Tensor, Tensor]],
    stream_index: Tensor,
    steps_done: int,
) -> list[float]:
    """Train all runs on the batches of an epoch, one stream per seed. Return the mean loss of each run."""
    counts = torch.stack([counts for counts, _ in batches], 1).to(stream_index.device)
    classes = torch.stack([classes for _, classes in batches], 1).to(stream_index.device)
    steps, batch_size = counts.shape[0], counts.shape[2]

    def per_run(values: list[float]) -> Tensor:
        return counts.new_tensor(values)[:, None, None]

    ov_lr = per_run([config.ov_lr / batch_size for config in configs])
    growth = per_run([(config.growth - 1) / config.steps for config in configs])
    step_index = torch.arange(steps_done, steps_done + steps).to(counts)[:, None, None, None]
    qk_lr = per_run([config.qk_lr * _SCORE_SCALE / batch_size for config in configs])
    qk_lrs = qk_lr * (1 + growth * step_index)
    label_probs = counts.new_empty(steps, len(configs), batch_size)
    for step in range(steps):
        label_probs[step], score_grad, ov_grad = gradients(
            counts[step].index_select(0, stream_index),
            classes[step].index_select(0, stream_index),
            qk.value() * _SCORE_SCALE,
            ov.value(),
        )
        qk.sgd_step(score_grad.mul_(qk_lrs[step]))
        ov.sgd_step(ov_grad.mul_(ov_lr))
    losses: list[float] = label_probs.log_().mean((0, 2)).neg_().tolist()
    for config, loss in zip(configs, losses, strict=True):
        if not np.isfinite(loss):
            raise InputError(
                f"{config.name} diverged by step {steps_done + steps}: lower qk_lr or ov_lr", code="diverged"
            )
    return losses


def _to_device(circuit: Circuit, device: str) -> None:
    for name, tensor in vars(circuit).items():
        setattr(circuit, name, tensor.to(device))


def _evaluate(
    config: SyntheticConfig, seed: int, steps: int, scores: Tensor, ov_weight: Tensor
) -> SyntheticResult:
    """Evaluate one run on 20,000 instances from a stream that training does not use."""
    held_out = BatchStream(seed + 2**32, config.seq_len, 20_000)
    counts, classes = held_out.next_batches(1, torch.float64)
    attention = attention_by_id(counts, classes, scores.double()[None])
    probs = torch.softmax(torch.bmm(attention, ov_weight.double()[None].mT), -1)[..., LABEL_IDS]
    label_probs = (probs * classes).sum(-1)[0].numpy()
    distinct = attention[0, :, N_COMMON:].sum(-1).numpy()
    return SyntheticResult(
        config,
        seed,
        steps,
        loss=float(-np.log(label_probs).mean()),
        mean_distinct_attention=float(distinct.mean()),
        mean_query_attention=float((attention[..., QUERY_IDS] * classes).sum(-1).mean()),
        heatmap=attention_heatmap(distinct, label_probs),
    )
