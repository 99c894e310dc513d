"""Training recipes per task: the single-knob setting, and the published one with its confounds.

The published settings, confounds and results are those of Vashisht & Ramaswamy (ICML 2026, arXiv 2608.06776):
their poster and public notebooks. The models here are pre-norm decoders of the published shape. Theirs have
no norms, no residual and no MLP for agreement, and GloVe embeddings at init for SQuAD.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from qkflow.config_io import dataclass_from_dict
from qkflow.data.tasks import TASKS
from qkflow.errors import unknown
from qkflow.models import ModelConfig

OptimizerName = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class Confounds:
    """Changes of the published "faster" setting besides the query-key learning rate."""

    scale_embed_lr: bool = False  # the embedding learning rate is multiplied by r too
    weight_decay: float | None = None  # replaces the weight decay of the baseline
    freeze: tuple[str, ...] = ()  # frozen roles
    other_lr_scale: float = 1.0  # factor on every other learning rate

    def describe(self) -> str:
        parts = []
        if self.scale_embed_lr:
            parts.append("the embedding learning rate is multiplied by r too")
        if self.weight_decay is not None:
            parts.append(f"weight decay is {self.weight_decay:g}")
        if self.freeze:
            parts.append(f"{' and '.join(self.freeze)} weights are frozen")
        if self.other_lr_scale != 1:
            parts.append(f"every other learning rate is {self.other_lr_scale:g} times that of the baseline")
        return "; ".join(parts)


@dataclass(frozen=True)
class Recipe:
    """Model, optimizer and measures of one task."""

    generates_answer: bool = False  # generate the answer as text instead of predicting a class
    n_layers: int = 1
    dim: int = 64
    n_heads: int = 4
    head_dim: int | None = 64
    hidden_dim: int = 256
    tokenizer: str = "words"
    max_length: int = 128  # tokens per example
    optimizer: OptimizerName = "adamw"
    lr: float = 1e-3
    weight_decay: float = 1e-2
    clip: float = 1.0
    batch_size: int = 32
    epochs: float = 5
    ratios: tuple[str, ...] = ("1", "3", "10", "30")
    threshold: float = 0.33  # of attention confidence
    ks: tuple[float, ...] = (5.0, 10.0, 20.0, 50.0)  # deleted tokens, %
    measured: int = 300  # test examples whose attention is measured
    confounds: Confounds = field(default_factory=Confounds)

    def with_model(self, model: ModelConfig) -> Recipe:
        """Return the recipe with the size of a pretrained model."""
        return replace(
            self,
            n_layers=model.n_layers,
            dim=model.dim,
            n_heads=model.n_heads,
            head_dim=model.head_dim,
            hidden_dim=model.resolved_hidden_dim,
            tokenizer="pretrained",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but `confounds` as plain data."""
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        del plain["confounds"]
        return plain

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        return dataclass_from_dict(cls, values, "recipe")


_AGREEMENT = Recipe(threshold=0.1)
_SQUAD = Recipe(
    generates_answer=True,
    n_layers=2,
    dim=128,
    head_dim=None,
    hidden_dim=512,
    tokenizer="bpe:4096",
    max_length=256,
    threshold=0.1,
    ratios=("1", "3", "10"),
    measured=100,
    ks=(5.0, 20.0),
)
RECIPES: dict[str, Recipe] = {name: Recipe() for name in TASKS} | {
    "agreement": _AGREEMENT,
    "squad": _SQUAD,
}
PUBLISHED_RECIPES: dict[str, Recipe] = {
    "agreement": replace(
        _AGREEMENT,
        optimizer="sgd",
        lr=5e-4,
        weight_decay=1e-5,
        epochs=15,
        ratios=("1", "100"),
        ks=(5.0,),
        confounds=Confounds(scale_embed_lr=True),
    ),
    "hatexplain": Recipe(
        lr=5e-5,
        weight_decay=1e-4,
        epochs=30,
        ratios=("1", "30"),
        ks=(5.0,),
        confounds=Confounds(scale_embed_lr=True, weight_decay=1e-3, freeze=("mlp",)),
    ),
    "squad": replace(
        _SQUAD,
        n_layers=6,
        dim=300,
        n_heads=6,
        hidden_dim=1200,
        lr=5e-4,
        weight_decay=0.05,
        clip=0.5,
        epochs=100,
        ratios=("1", "20"),
        ks=(5.0,),
        confounds=Confounds(other_lr_scale=0.1),
    ),
}

# Task → measure → (baseline, faster). Performance is accuracy, for SQuAD the F1 of the generated answer.
PUBLISHED_RESULTS: dict[str, dict[str, tuple[float, float]]] = {
    "squad": {
        "performance": (0.5611, 0.5686),
        "confidence": (0.1265, 0.4295),
        "comprehensiveness": (0.38, 0.53),
    },
    "agreement": {
        "performance": (0.9243, 0.9341),
        "confidence": (0.4167, 0.7685),
        "comprehensiveness": (0.24, 0.30),
    },
    "hatexplain": {
        "performance": (0.5574, 0.5690),
        "confidence": (0.0, 0.4350),
        "comprehensiveness": (0.40, 0.48),
    },
}


def get_recipe(task: str, as_published: bool, **overrides: Any) -> Recipe:
    """Return the recipe of a task with overrides applied. An override of None is ignored."""
    recipes = PUBLISHED_RECIPES if as_published else RECIPES
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if task not in recipes:
        raise unknown("published task", task, recipes)
    return replace(recipes[task], **{name: value for name, value in overrides.items() if value is not None})
