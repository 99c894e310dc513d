"""The projections of attention: the QK circuit (where to attend) and the OV circuit (what is written).

Each circuit is factorized (W_Q, W_K / W_V, W_O) or collapsed into one matrix per head (W_QK / W_OV): the
four parameterizations FAFO, FACO, CAFO, CACO of Vashisht & Ramaswamy (2026); QK comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from qkflow.attention.init import ParamSampler, Part, copy_into
from qkflow.errors import InputError, unknown

CIRCUITS = ("FAFO", "FACO", "CAFO", "CACO")


@dataclass(frozen=True)
class HeadShapes:
    """Head counts and sizes of queries, keys, values and outputs.

    Query head h uses key head h // group_size: groups are contiguous.
    """

    n_q: int
    n_k: int
    n_v: int
    head_dim: int  # of a query and of a key
    v_head_dim: int
    n_out: int  # heads of the scoring output
    out_head_dim: int

    def __post_init__(self) -> None:
        if self.n_q % self.n_k:
            raise InputError(
                f"{self.n_q} query heads cannot be divided over {self.n_k} key heads",
                code="heads-not-divisible",
            )

    @property
    def group_size(self) -> int:
        """Query heads per key head."""
        return self.n_q // self.n_k


def is_plain_linear(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether calling this layer is exactly `F.linear` with its weight: no adapter, no hook.

    Sharded and quantized weights are tensor subclasses, which cannot be stacked.
    """
    return type(layer) is nn.Linear and type(layer.weight) in (nn.Parameter, Tensor) and has_no_hooks(layer)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling this module runs the forward of its class and nothing else."""
    return "forward" not in module.__dict__ and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def can_fuse(coupling: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Whether a coupling may be replaced by a fused form: no hook, no offloaded weight, all of this dtype."""
    tensors = [*coupling.parameters(), *coupling.buffers()]
    floats = [x for x in tensors if x.is_floating_point()]
    return (
        all(has_no_hooks(module) for module in coupling.modules())
        and not any(x.is_meta for x in tensors)
        and (dtype is None or all(x.dtype == dtype for x in floats))
    )


def is_autocast_enabled(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def check_not_offloaded(weight: Tensor, x: Tensor, module_class: str) -> None:
    """Raise if accelerate offloaded this weight: it reloads weights only for modules that are called."""
    if weight.is_meta and not x.is_meta:
        raise InputError(
            f"weights used by {module_class} are offloaded: give accelerate "
            f"preload_module_classes=['{module_class}']",
            code="weights-offloaded",
        )


def stack_linear(rows: Iterable[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Stack (weight, bias) pairs of linear maps into one map; a missing bias counts as zero."""
    rows = list(rows)
    weight = torch.cat([weight.detach() for weight, _ in rows])
    if all(bias is None for _, bias in rows):
        return weight, None
    return weight, torch.cat([w.new_zeros(len(w)) if b is None else b.detach() for w, b in rows])


class FactorizedQK(nn.Module):
    """q = x·W_Qᵀ, k = x·W_Kᵀ, split into heads."""

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
        """Whether both projections are exactly `F.linear` with their weights."""
        return is_plain_linear(self.q) and is_plain_linear(self.k)

    def project_keys(self, x: Tensor) -> Tensor:
        keys: Tensor = self.k(x)
        return keys.unflatten(-1, (self.head_shapes.n_k, self.head_shapes.head_dim))

    def drifted_query_projection(self, drift: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the weight W_Q + drift_h·W_K and its bias: the projection to q + drift_h·k."""
        scale = drift.repeat_interleave(self.head_shapes.head_dim)
        weight = torch.addcmul(self.q.weight, scale[:, None], self.repeat_key_rows(self.k.weight))
        if self.q.bias is None:
            return weight, None
        return weight, self.q.bias + scale * self.repeat_key_rows(self.k.bias)

    def repeat_key_rows(self, weight: Tensor) -> Tensor:
        """Repeat the rows of a key projection (G·D, …) to match the query rows (H·D, …)."""
        heads = self.head_shapes
        if heads.group_size == 1:
            return weight
        per_head = weight.unflatten(0, (heads.n_k, heads.head_dim))
        return per_head.repeat_interleave(heads.group_size, dim=0).flatten(0, 1)

    @torch.no_grad()
    def fold_drift(self, drift: Tensor) -> None:
        """Fold q + drift_h·k into the query projection, in place; `drift` is (H,)."""
        weight, bias = self.drifted_query_projection(drift)
        self.q.weight.copy_(weight)
        if bias is not None:
            self.q.bias.copy_(bias)

    def init_parameters(self, sampler: ParamSampler) -> None:
        scheme = sampler.scheme
        sampler.init_linear("q", self.q, part="qk")
        sampler.init_linear("k", self.k, part="qk")
        if scheme.modifier in ("symmetric", "symmetric_score"):
            c = scheme.strength
            if scheme.modifier == "symmetric_score":  # the score of a token with itself per unit of c
                dim, head_dim = self.q.in_features, self.head_shapes.head_dim
                c /= head_dim**0.5 * sampler.std(dim, "qk") ** 2 * dim
            self.fold_drift(torch.full((self.head_shapes.n_q,), c, device=self.q.weight.device))
        elif scheme.modifier == "random_partner":
            self._add_random_partner(sampler)
        elif scheme.modifier == "tied_qk":
            copy_into(self.q.weight, self.repeat_key_rows(self.k.weight))
        elif scheme.modifier == "zero_q":
            nn.init.zeros_(self.q.weight)
        elif scheme.modifier == "mimetic":
            self._init_mimetic(sampler)
        elif scheme.modifier == "scaled_identity":
            for layer in (self.q, self.k):
                nn.init.eye_(layer.weight).mul_(scheme.strength)

    def _add_random_partner(self, sampler: ParamSampler) -> None:
        """Set W_Q + c·P: P is drawn like W_K, with the norm of W_K in every key head."""
        keys = self.k.weight.double().cpu()
        partner = sampler.matrix("partner.weight", keys.shape, self.k.in_features, part="qk")
        per_head = (self.head_shapes.n_k, -1)
        norms = keys.view(per_head).norm(dim=1) / partner.view(per_head).norm(dim=1)
        partner = (partner.view(per_head) * norms[:, None]).view_as(keys)
        added = sampler.scheme.strength * self.repeat_key_rows(partner)
        copy_into(self.q.weight, self.q.weight.double().cpu() + added)

    def _init_mimetic(self, sampler: ParamSampler) -> None:
        """Set W_Q,hᵀ·W_K,g ≈ s·(Z_h + I): the best rank-D factors for the first head of a group, then the
        least-squares queries for the other heads of the group, given the shared key."""
        heads, dim, s = self.head_shapes, self.q.in_features, sampler.scheme.strength
        target = sampler.normal("mimetic", (heads.n_k, heads.group_size, dim, dim), s / dim**0.5)
        target += s * torch.eye(dim, dtype=target.dtype)
        left, values, right = torch.linalg.svd(target[:, 0])
        root = values[:, : heads.head_dim, None].sqrt()
        keys = root * right[:, : heads.head_dim]  # (G, D, dim)
        queries = (target @ torch.linalg.pinv(keys)[:, None]).transpose(-1, -2)  # (G, group, D, dim)
        queries[:, 0] = root * left[..., : heads.head_dim].transpose(-1, -2)
        copy_into(self.k.weight, keys.flatten(0, 1))
        copy_into(self.q.weight, queries.flatten(0, 2))


class CollapsedQK(nn.Module):
    """score = x·W_QK·xᵀ per head: the query is x·W_QK, the key is the token itself."""

    roles: ClassVar[dict[str, str]] = {"weight": "qk"}

    def __init__(self, dim: int, heads: HeadShapes, bias: bool, **factory_kwargs: Any) -> None:
        super().__init__()
        if bias:
            raise InputError("a collapsed circuit has no bias: use bias=False", code="collapsed-circuit-bias")
        self.head_shapes = heads
        self.weight = nn.Parameter(torch.empty(heads.n_q, dim, dim, **factory_kwargs))

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("btd,hde->bthe", x, self.weight), context.unsqueeze(2)

    def init_parameters(self, sampler: ParamSampler) -> None:
        if sampler.scheme.modifier not in (None, "scaled_identity"):
            raise InputError(
                f"init '{sampler.scheme}' needs W_Q and W_K, which a collapsed circuit does not have: use a "
                "base (gpt2, fan_in, modern) or scaled_identity",
                code="init-needs-factorized",
            )
        _init_collapsed(self.weight, sampler, "qk")


class FactorizedOV(nn.Module):
    """v = x·W_Vᵀ split into heads, and the output projection W_O."""

    roles: ClassVar[dict[str, str]] = {"v": "v", "o": "o"}

    def __init__(self, dim: int, heads: HeadShapes, bias: bool, **factory_kwargs: Any) -> None:
        super().__init__()
        self.head_shapes = heads
        self.v = nn.Linear(dim, heads.n_v * heads.v_head_dim, bias=bias, **factory_kwargs)
        self.o = nn.Linear(heads.n_out * heads.out_head_dim, dim, bias=bias, **factory_kwargs)

    def project_values(self, x: Tensor) -> Tensor:
        values: Tensor = self.v(x)
        return values.unflatten(-1, (self.head_shapes.n_v, self.head_shapes.v_head_dim))

    def project_output(self, heads_out: Tensor) -> Tensor:
        out: Tensor = self.o(heads_out.flatten(-2))
        return out

    def init_parameters(self, sampler: ParamSampler) -> None:
        sampler.init_linear("v", self.v, part="ov")
        sampler.init_linear("o", self.o, part="out")
        if sampler.scheme.modifier == "mimetic":
            self._init_mimetic(sampler)
        elif sampler.scheme.modifier == "scaled_identity":
            for layer in (self.v, self.o):
                nn.init.eye_(layer.weight).mul_(sampler.scheme.strength)

    def _init_mimetic(self, sampler: ParamSampler) -> None:
        """Set W_O·W_V ≈ 0.4·Z − 0.4·I: the best factors of the rank of the value heads. Heads that share a
        value share its output equally."""
        heads, dim = self.head_shapes, self.v.in_features
        rank = self.v.out_features
        target = sampler.normal("mimetic", (dim, dim), 0.4 / dim**0.5)
        target -= 0.4 * torch.eye(dim, dtype=target.dtype)
        left, values, right = torch.linalg.svd(target)
        rank_kept = min(rank, dim)
        root = torch.zeros(rank, dtype=target.dtype)
        root[:rank_kept] = values[:rank_kept].sqrt()
        value = torch.zeros(rank, dim, dtype=target.dtype)
        value[:rank_kept] = root[:rank_kept, None] * right[:rank_kept]
        output = torch.zeros(dim, rank, dtype=target.dtype)
        output[:, :rank_kept] = left[:, :rank_kept] * root[:rank_kept]
        shared = heads.n_out * heads.out_head_dim // rank
        per_head = output.unflatten(1, (heads.n_v, heads.v_head_dim))
        copy_into(self.v.weight, value)
        copy_into(self.o.weight, per_head.repeat_interleave(shared, dim=1).flatten(1) / shared)


class CollapsedOV(nn.Module):
    """Head h outputs the attention-weighted sum of W_OV,h·x."""

    roles: ClassVar[dict[str, str]] = {"weight": "ov"}

    def __init__(self, dim: int, heads: HeadShapes, bias: bool, **factory_kwargs: Any) -> None:
        super().__init__()
        if bias:
            raise InputError("a collapsed circuit has no bias: use bias=False", code="collapsed-circuit-bias")
        self.weight = nn.Parameter(torch.empty(heads.n_v, dim, dim, **factory_kwargs))

    def project_values(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,hde->bthe", x, self.weight)

    def project_output(self, heads_out: Tensor) -> Tensor:
        return heads_out.sum(dim=2)

    def init_parameters(self, sampler: ParamSampler) -> None:
        scheme = sampler.scheme
        if scheme.modifier == "mimetic" or "ov" in dict(scheme.parts):
            raise InputError(
                f"init '{scheme}' needs W_V and W_O, which a collapsed circuit does not have: use another "
                "modifier than mimetic, and out= for W_OV",
                code="init-needs-factorized",
            )
        _init_collapsed(self.weight, sampler, "out")


def _init_collapsed(weight: nn.Parameter, sampler: ParamSampler, part: Part) -> None:
    dim = weight.shape[-1]
    if sampler.scheme.modifier == "scaled_identity":
        copy_into(weight, sampler.uniform("weight", weight.shape, dim**-0.5))
    else:
        copy_into(weight, sampler.matrix("weight", weight.shape, dim, part=part))


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
    """Return the head shapes after collapsing: the key of a collapsed circuit is the token itself."""
    size, keys = (dim, 1) if name.startswith("CA") else (heads.head_dim, heads.n_k)
    if name.endswith("FO"):
        return HeadShapes(heads.n_q, keys, heads.n_v, size, heads.v_head_dim, heads.n_out, heads.out_head_dim)
    return HeadShapes(heads.n_q, keys, heads.n_q, size, dim, heads.n_q, dim)
