"""Softmax attention whose head outputs are normalized: differential attention without its difference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention.init import ParamSampler
from qkflow.attention.masks import Mask
from qkflow.attention.projections import HeadShapes
from qkflow.attention.scorings.base import FactoryKwargs, register
from qkflow.attention.scorings.softmax import Softmax


@register
class SoftmaxNorm(Softmax):
    """RMSNorm(softmax(q·kᵀ/√D)·v) per head, with one gain for all heads of a layer."""

    name = "softmax_norm"
    equation = "RMSNorm(softmax(q·kᵀ/√D)·v)"
    citation = "Wang et al. 2022, arXiv 2210.06423 (Sub-LN), per head as in arXiv 2410.05258"
    good_for = "the control of differential attention: its norm without its difference"
    eps = 1e-5

    def __init__(
        self, head_shapes: HeadShapes, dim: int, layer_idx: int, factory_kwargs: FactoryKwargs
    ) -> None:
        super().__init__(head_shapes, dim, layer_idx, factory_kwargs)
        self.norm = nn.Parameter(torch.empty(head_shapes.out_head_dim, **factory_kwargs))

    def _normalize(self, out: Tensor) -> Tensor:
        return F.rms_norm(out, out.shape[-1:], self.norm, self.eps)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, dropout: float, x: Tensor
    ) -> Tensor:
        return self._normalize(super().forward(q, k, v, mask=mask, scale=scale, dropout=dropout, x=x))

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, weight = super().reference(q, k, v, mask=mask, scale=scale, x=x)
        return self._normalize(out), weight

    def extra_parameters(self) -> int:
        return self.norm.numel()

    def init_parameters(self, sampler: ParamSampler) -> None:
        nn.init.ones_(self.norm)
