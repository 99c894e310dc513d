"""The two circuits of attention: QK decides where to look, OV decides what is written.

Each is factorised (W_Q, W_K / W_V, W_O) or collapsed into one matrix per head (W_QK / W_OV): the four
parameterisations FAFO, FACO, CAFO, CACO of Vashisht & Ramaswamy (2026), QK's letter first.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from qkflow.attention.heads import HeadShapes
from qkflow.attention.init import ParamSampler, copy_into
from qkflow.errors import InputError, unknown

CIRCUITS = ("FAFO", "FACO", "CAFO", "CACO")


def is_plain_linear(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether calling this layer is no more than a product with its weight: no adapter, no hook."""
    return type(layer) is nn.Linear and has_no_hooks(layer)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling this module runs its class's forward and nothing else."""
    return "forward" not in module.__dict__ and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_autocast_enabled(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class FactorizedQK(nn.Module):
    """q = x·W_Qᵀ, k = x·W_Kᵀ, cut into heads."""

    roles: ClassVar[dict[str, str]] = {"q": "q", "k": "k"}

    def __init__(self, dim: int, heads: HeadShapes, bias: bool, **factory_kwargs: Any) -> None:
        super().__init__()
        self.head_shapes = heads
        self.q = nn.Linear(dim, heads.n_q * heads.head_dim, bias=bias, **factory_kwargs)
        self.k = nn.Linear(dim, heads.n_k * heads.head_dim, bias=bias, **factory_kwargs)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q(x).unflatten(-1, (self.head_shapes.n_q, self.head_shapes.head_dim))
        return q, self.project_keys(context)

    @property
    def is_plain(self) -> bool:
        """Whether projecting is no more than a product with the weights: nothing stands in their place."""
        return is_plain_linear(self.q) and is_plain_linear(self.k)

    def project_keys(self, x: Tensor) -> Tensor:
        keys: Tensor = self.k(x)
        return keys.unflatten(-1, (self.head_shapes.n_k, self.head_shapes.head_dim))

    def drifted_query_projection(self, drift: Tensor) -> tuple[Tensor, Tensor | None]:
        """W_Q + amount_h·W_K and its bias: the projection that yields q + amount_h·k."""
        scale = drift.repeat_interleave(self.head_shapes.head_dim)
        weight = torch.addcmul(self.q.weight, scale[:, None], self.repeat_key_rows(self.k.weight))
        if self.q.bias is None:
            return weight, None
        return weight, self.q.bias + scale * self.repeat_key_rows(self.k.bias)

    def repeat_key_rows(self, weight: Tensor) -> Tensor:
        """Repeat the rows of a key projection (G·D, …) to line up with the query rows (H·D, …)."""
        heads = self.head_shapes
        if heads.group_size == 1:
            return weight
        per_head = weight.unflatten(0, (heads.n_k, heads.head_dim))
        return per_head.repeat_interleave(heads.group_size, dim=0).flatten(0, 1)

    @torch.no_grad()
    def fold_drift(self, drift: Tensor) -> None:
        """Make the queries q + amount_h·k for good; `amount` has one entry a query head."""
        weight, bias = self.drifted_query_projection(drift)
        self.q.weight.copy_(weight)
        if bias is not None:
            self.q.bias.copy_(bias)

    def init_parameters(self, sampler: ParamSampler) -> None:
        start = sampler.scheme
        sampler.init_linear("q", self.q)
        sampler.init_linear("k", self.k)
        if start.modifier == "symmetric":
            self.fold_drift(torch.full((self.head_shapes.n_q,), start.strength, device=self.q.weight.device))
        elif start.modifier == "mimetic":
            self._init_mimetic(sampler)
        elif start.modifier == "scaled_identity":
            for layer in (self.q, self.k):
                nn.init.eye_(layer.weight).mul_(start.strength)

    def _init_mimetic(self, sampler: ParamSampler) -> None:
        """W_Q,hᵀ·W_K,g ≈ s·(Z_h + I): the best rank-D factors for a group's first head, then for the
        group's other heads the queries that come nearest with the key they share."""
        heads, width, s = self.head_shapes, self.q.in_features, sampler.scheme.strength
        target = sampler.normal("mimetic", (heads.n_k, heads.group_size, width, width), s / width**0.5)
        target += s * torch.eye(width, dtype=target.dtype)
        left, values, right = torch.linalg.svd(target[:, 0])
        root = values[:, : heads.head_dim, None].sqrt()
        keys = root * right[:, : heads.head_dim]  # (G, D, width)
        queries = (target @ torch.linalg.pinv(keys)[:, None]).transpose(-1, -2)  # (G, group, D, width)
        queries[:, 0] = root * left[..., : heads.head_dim].transpose(-1, -2)
        copy_into(self.k.weight, keys.flatten(0, 1))
        copy_into(self.q.weight, queries.flatten(0, 2))


class CollapsedQK(nn.Module):
    """score = x·W_QK·xᵀ per head: the query is x·W_QK, the key is the token itself."""

    roles: ClassVar[dict[str, str]] = {"weight": "qk"}

    def __init__(self, dim: int, heads: HeadShapes, bias: bool, **factory_kwargs: Any) -> None:
        super().__init__()
        if bias:
            raise InputError("a collapsed circuit is one matrix and has no bias: use bias=False")
        self.head_shapes = heads
        self.weight = nn.Parameter(torch.empty(heads.n_q, dim, dim, **factory_kwargs))

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("btd,hde->bthe", x, self.weight), context.unsqueeze(2)

    def init_parameters(self, sampler: ParamSampler) -> None:
        _init_collapsed(self.weight, sampler, residual=False)


class FactorizedOV(nn.Module):
    """v = x·W_Vᵀ cut into heads; what the heads gathered is written through W_O."""

    roles: ClassVar[dict[str, str]] = {"v": "v", "o": "o"}

    def __init__(self, dim: int, heads: HeadShapes, bias: bool, **factory_kwargs: Any) -> None:
        super().__init__()
        self.head_shapes = heads
        self.v = nn.Linear(dim, heads.n_v * heads.v_head_dim, bias=bias, **factory_kwargs)
        self.o = nn.Linear(heads.n_out * heads.out_head_dim, dim, bias=bias, **factory_kwargs)

    def project_values(self, x: Tensor) -> Tensor:
        values: Tensor = self.v(x)
        return values.unflatten(-1, (self.head_shapes.n_v, self.head_shapes.v_head_dim))

    def project_output(self, gathered: Tensor) -> Tensor:
        out: Tensor = self.o(gathered.flatten(-2))
        return out

    def init_parameters(self, sampler: ParamSampler) -> None:
        sampler.init_linear("v", self.v)
        sampler.init_linear("o", self.o, residual=True)
        if sampler.scheme.modifier == "mimetic":
            self._init_mimetic(sampler)
        elif sampler.scheme.modifier == "scaled_identity":
            for layer in (self.v, self.o):
                nn.init.eye_(layer.weight).mul_(sampler.scheme.strength)

    def _init_mimetic(self, sampler: ParamSampler) -> None:
        """W_O·W_V ≈ 0.4·Z − 0.4·I, the best factors of the rank that the value heads allow; heads that
        share a value share its output equally."""
        heads, width = self.head_shapes, self.v.in_features
        rank = self.v.out_features
        target = sampler.normal("mimetic", (width, width), 0.4 / width**0.5)
        target -= 0.4 * torch.eye(width, dtype=target.dtype)
        left, values, right = torch.linalg.svd(target)
        rank_kept = min(rank, width)
        root = torch.zeros(rank, dtype=target.dtype)
        root[:rank_kept] = values[:rank_kept].sqrt()
        value = torch.zeros(rank, width, dtype=target.dtype)
        value[:rank_kept] = root[:rank_kept, None] * right[:rank_kept]
        output = torch.zeros(width, rank, dtype=target.dtype)
        output[:, :rank_kept] = left[:, :rank_kept] * root[:rank_kept]
        shared = heads.n_out * heads.out_head_dim // rank
        per_head = output.unflatten(1, (heads.n_v, heads.v_head_dim))
        copy_into(self.v.weight, value)
        copy_into(self.o.weight, per_head.repeat_interleave(shared, dim=1).flatten(1) / shared)


class CollapsedOV(nn.Module):
    """What head h writes is W_OV,h·x of the tokens it attends to."""

    roles: ClassVar[dict[str, str]] = {"weight": "ov"}

    def __init__(self, dim: int, heads: HeadShapes, bias: bool, **factory_kwargs: Any) -> None:
        super().__init__()
        if bias:
            raise InputError("a collapsed circuit is one matrix and has no bias: use bias=False")
        self.weight = nn.Parameter(torch.empty(heads.n_v, dim, dim, **factory_kwargs))

    def project_values(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,hde->bthe", x, self.weight)

    def project_output(self, gathered: Tensor) -> Tensor:
        return gathered.sum(dim=2)

    def init_parameters(self, sampler: ParamSampler) -> None:
        _init_collapsed(self.weight, sampler, residual=True)


def _init_collapsed(weight: nn.Parameter, sampler: ParamSampler, *, residual: bool) -> None:
    width = weight.shape[-1]
    if sampler.scheme.modifier == "scaled_identity":
        copy_into(weight, sampler.uniform("weight", weight.shape, width**-0.5))
    elif sampler.scheme.modifier is None:
        copy_into(weight, sampler.matrix("weight", weight.shape, width, residual=residual))
    else:
        raise InputError(
            f"start '{sampler.scheme}' is made of W_Q and W_K, which a collapsed circuit does not have"
        )


QKCircuit = FactorizedQK | CollapsedQK
OVCircuit = FactorizedOV | CollapsedOV


def build_circuits(
    name: str, dim: int, heads: HeadShapes, bias: bool, **factory_kwargs: Any
) -> tuple[QKCircuit, OVCircuit]:
    if name not in CIRCUITS:
        raise unknown("circuit", name, CIRCUITS)
    qk = FactorizedQK if name.startswith("FA") else CollapsedQK
    ov = FactorizedOV if name.endswith("FO") else CollapsedOV
    return qk(dim, heads, bias, **factory_kwargs), ov(dim, heads, bias, **factory_kwargs)


def circuit_head_shapes(name: str, dim: int, heads: HeadShapes) -> HeadShapes:
    """The head sizes once collapsed circuits have widened theirs: a collapsed key is the token itself."""
    size, keys = (dim, 1) if name.startswith("CA") else (heads.head_dim, heads.n_k)
    if name.endswith("FO"):
        return HeadShapes(heads.n_q, keys, heads.n_v, size, heads.v_head_dim, heads.n_out, heads.out_head_dim)
    return HeadShapes(heads.n_q, keys, heads.n_q, size, dim, heads.n_q, dim)
