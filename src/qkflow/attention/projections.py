"""The two circuits of attention: QK decides where to look, OV decides what is written.

Each is factorised (W_Q, W_K / W_V, W_O) or collapsed into one matrix per head (W_QK / W_OV): the four
parameterisations FAFO, FACO, CAFO, CACO of Vashisht & Ramaswamy (2026), QK's letter first.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from qkflow.attention.heads import Heads
from qkflow.attention.init import Draw, fill
from qkflow.errors import InputError, unknown

CIRCUITS = ("FAFO", "FACO", "CAFO", "CACO")


def untouched(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether calling this layer is no more than a product with its weight: no adapter, no hook."""
    return type(layer) is nn.Linear and unwatched(layer)


def unwatched(module: nn.Module) -> bool:
    """Whether calling this module runs its class's forward and nothing else."""
    return "forward" not in module.__dict__ and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def under_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class FactorisedQK(nn.Module):
    """q = x·W_Qᵀ, k = x·W_Kᵀ, cut into heads."""

    roles: ClassVar[dict[str, str]] = {"q": "q", "k": "k"}

    def __init__(self, width: int, heads: Heads, bias: bool, **where: Any) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, heads.queries * heads.size, bias=bias, **where)
        self.k = nn.Linear(width, heads.keys * heads.size, bias=bias, **where)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q(x).unflatten(-1, (self.heads.queries, self.heads.size))
        return q, self.keys(context)

    @property
    def plain(self) -> bool:
        """Whether projecting is no more than a product with the weights: nothing stands in their place."""
        return untouched(self.q) and untouched(self.k)

    def keys(self, x: Tensor) -> Tensor:
        keys: Tensor = self.k(x)
        return keys.unflatten(-1, (self.heads.keys, self.heads.size))

    def drifted(self, amount: Tensor) -> tuple[Tensor, Tensor | None]:
        """W_Q + amount_h·W_K and its bias: the projection that yields q + amount_h·k."""
        scale = amount.repeat_interleave(self.heads.size)
        weight = torch.addcmul(self.q.weight, scale[:, None], self.keys_for_queries(self.k.weight))
        if self.q.bias is None:
            return weight, None
        return weight, self.q.bias + scale * self.keys_for_queries(self.k.bias)

    def keys_for_queries(self, weight: Tensor) -> Tensor:
        """Repeat the rows of a key projection (G·D, …) to line up with the query rows (H·D, …)."""
        heads = self.heads
        if heads.group == 1:
            return weight
        per_head = weight.unflatten(0, (heads.keys, heads.size))
        return per_head.repeat_interleave(heads.group, dim=0).flatten(0, 1)

    @torch.no_grad()
    def fold_drift(self, amount: Tensor) -> None:
        """Make the queries q + amount_h·k for good; `amount` has one entry a query head."""
        weight, bias = self.drifted(amount)
        self.q.weight.copy_(weight)
        if bias is not None:
            self.q.bias.copy_(bias)

    def start_parameters(self, draw: Draw) -> None:
        start = draw.start
        draw.linear("q", self.q)
        draw.linear("k", self.k)
        if start.modifier == "symmetric":
            self.fold_drift(torch.full((self.heads.queries,), start.strength, device=self.q.weight.device))
        elif start.modifier == "mimetic":
            self._start_mimetic(draw)
        elif start.modifier == "scaled_identity":
            for layer in (self.q, self.k):
                nn.init.eye_(layer.weight).mul_(start.strength)

    def _start_mimetic(self, draw: Draw) -> None:
        """W_Q,hᵀ·W_K,g ≈ s·(Z_h + I): the best rank-D factors for a group's first head, then for the
        group's other heads the queries that come nearest with the key they share."""
        heads, width, s = self.heads, self.q.in_features, draw.start.strength
        target = draw.normal("mimetic", (heads.keys, heads.group, width, width), s / width**0.5)
        target += s * torch.eye(width, dtype=target.dtype)
        left, values, right = torch.linalg.svd(target[:, 0])
        root = values[:, : heads.size, None].sqrt()
        keys = root * right[:, : heads.size]  # (G, D, width)
        queries = (target @ torch.linalg.pinv(keys)[:, None]).transpose(-1, -2)  # (G, group, D, width)
        queries[:, 0] = root * left[..., : heads.size].transpose(-1, -2)
        fill(self.k.weight, keys.flatten(0, 1))
        fill(self.q.weight, queries.flatten(0, 2))


class CollapsedQK(nn.Module):
    """score = x·W_QK·xᵀ per head: the query is x·W_QK, the key is the token itself."""

    roles: ClassVar[dict[str, str]] = {"weight": "qk"}

    def __init__(self, width: int, heads: Heads, bias: bool, **where: Any) -> None:
        super().__init__()
        if bias:
            raise InputError("a collapsed circuit is one matrix and has no bias: use bias=False")
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads.queries, width, width, **where))

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("btd,hde->bthe", x, self.weight), context.unsqueeze(2)

    def start_parameters(self, draw: Draw) -> None:
        _start_collapsed(self.weight, draw, residual=False)


class FactorisedOV(nn.Module):
    """v = x·W_Vᵀ cut into heads; what the heads gathered is written through W_O."""

    roles: ClassVar[dict[str, str]] = {"v": "v", "o": "o"}

    def __init__(self, width: int, heads: Heads, bias: bool, **where: Any) -> None:
        super().__init__()
        self.heads = heads
        self.v = nn.Linear(width, heads.values * heads.value_size, bias=bias, **where)
        self.o = nn.Linear(heads.outputs * heads.output_size, width, bias=bias, **where)

    def values(self, x: Tensor) -> Tensor:
        values: Tensor = self.v(x)
        return values.unflatten(-1, (self.heads.values, self.heads.value_size))

    def write(self, gathered: Tensor) -> Tensor:
        out: Tensor = self.o(gathered.flatten(-2))
        return out

    def start_parameters(self, draw: Draw) -> None:
        draw.linear("v", self.v)
        draw.linear("o", self.o, residual=True)
        if draw.start.modifier == "mimetic":
            self._start_mimetic(draw)
        elif draw.start.modifier == "scaled_identity":
            for layer in (self.v, self.o):
                nn.init.eye_(layer.weight).mul_(draw.start.strength)

    def _start_mimetic(self, draw: Draw) -> None:
        """W_O·W_V ≈ 0.4·Z − 0.4·I, the best factors of the rank that the value heads allow; heads that
        share a value share its output equally."""
        heads, width = self.heads, self.v.in_features
        rank = self.v.out_features
        target = draw.normal("mimetic", (width, width), 0.4 / width**0.5)
        target -= 0.4 * torch.eye(width, dtype=target.dtype)
        left, values, right = torch.linalg.svd(target)
        rank_kept = min(rank, width)
        root = torch.zeros(rank, dtype=target.dtype)
        root[:rank_kept] = values[:rank_kept].sqrt()
        value = torch.zeros(rank, width, dtype=target.dtype)
        value[:rank_kept] = root[:rank_kept, None] * right[:rank_kept]
        output = torch.zeros(width, rank, dtype=target.dtype)
        output[:, :rank_kept] = left[:, :rank_kept] * root[:rank_kept]
        shared = heads.outputs * heads.output_size // rank
        per_head = output.unflatten(1, (heads.values, heads.value_size))
        fill(self.v.weight, value)
        fill(self.o.weight, per_head.repeat_interleave(shared, dim=1).flatten(1) / shared)


class CollapsedOV(nn.Module):
    """What head h writes is W_OV,h·x of the tokens it attends to."""

    roles: ClassVar[dict[str, str]] = {"weight": "ov"}

    def __init__(self, width: int, heads: Heads, bias: bool, **where: Any) -> None:
        super().__init__()
        if bias:
            raise InputError("a collapsed circuit is one matrix and has no bias: use bias=False")
        self.weight = nn.Parameter(torch.empty(heads.values, width, width, **where))

    def values(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,hde->bthe", x, self.weight)

    def write(self, gathered: Tensor) -> Tensor:
        return gathered.sum(dim=2)

    def start_parameters(self, draw: Draw) -> None:
        _start_collapsed(self.weight, draw, residual=True)


def _start_collapsed(weight: nn.Parameter, draw: Draw, *, residual: bool) -> None:
    width = weight.shape[-1]
    if draw.start.modifier == "scaled_identity":
        fill(weight, draw.uniform("weight", weight.shape, width**-0.5))
    elif draw.start.modifier is None:
        fill(weight, draw.matrix("weight", weight.shape, width, residual=residual))
    else:
        raise InputError(
            f"start '{draw.start}' is made of W_Q and W_K, which a collapsed circuit does not have"
        )


QKCircuit = FactorisedQK | CollapsedQK
OVCircuit = FactorisedOV | CollapsedOV


def build_circuits(
    name: str, width: int, heads: Heads, bias: bool, **where: Any
) -> tuple[QKCircuit, OVCircuit]:
    if name not in CIRCUITS:
        raise unknown("circuit", name, CIRCUITS)
    qk = FactorisedQK if name.startswith("FA") else CollapsedQK
    ov = FactorisedOV if name.endswith("FO") else CollapsedOV
    return qk(width, heads, bias, **where), ov(width, heads, bias, **where)


def circuit_heads(name: str, width: int, heads: Heads) -> Heads:
    """The head sizes once collapsed circuits have widened theirs: a collapsed key is the token itself."""
    size, keys = (width, 1) if name.startswith("CA") else (heads.size, heads.keys)
    if name.endswith("FO"):
        return Heads(
            heads.queries, keys, heads.values, size, heads.value_size, heads.outputs, heads.output_size
        )
    return Heads(heads.queries, keys, heads.queries, size, width, heads.queries, width)
