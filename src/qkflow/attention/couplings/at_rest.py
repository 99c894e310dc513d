"""Couplings at rest: in inference weights stand still, so products of them are made once.

One token passes through a layer in a few hundred microseconds, most of them spent on reading weights; every
small operation counts, even one that only looks at a tensor in another way. So one product with a prepared
matrix yields queries, keys and all latents, with the drift, the step sizes and every bias inside it, and the
coupling changes them where they lie. The queries of a group are one long vector to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention.heads import HeadShapes

if TYPE_CHECKING:
    from qkflow.attention.couplings.affine import Affine
    from qkflow.attention.couplings.base import Coupling, HeadNetworks
    from qkflow.attention.couplings.drift import Drift
    from qkflow.attention.couplings.latent import LatentCoupling
    from qkflow.attention.couplings.trajectory import Rule
    from qkflow.attention.projections import FactorizedQK

LARGEST_BLOCK_DIAGONAL = 2**15  # numbers; of a larger one, reading the zeros costs too much


@dataclass(frozen=True)
class AtRest:
    """Projection and coupling as one product (`projection`, `bias`) and what remains to be done with it.

    The product yields queries, keys, latents and, if asked to, values, in this order; without latents it is
    all there is to do.
    """

    heads: HeadShapes
    projection: Tensor
    bias: Tensor | None
    values: int = field(default=0, kw_only=True)  # rows

    def with_values(self, v: nn.Linear) -> Self:
        """The same for a product that yields a layer's values too: one product is sooner done than two."""
        parts = self.projection, v.weight
        bias = None
        if self.bias is not None or v.bias is not None:
            given = zip(parts, (self.bias, v.bias), strict=True)
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b.detach() for w, b in given])
        return replace(self, projection=for_products(torch.cat(parts)), bias=bias, values=len(v.weight))

    @cached_property
    def widths(self) -> tuple[int, int, int, int]:
        """How many numbers of the product are queries, keys, latents and values."""
        queries, keys = self.heads.n_q * self.heads.head_dim, self.heads.n_k * self.heads.head_dim
        return queries, keys, len(self.projection) - queries - keys - self.values, self.values

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coupled queries (B, T, H·D) and keys (B, T, G·D), and values, of tokens x (B, T, width)."""
        q, k, latents, v = F.linear(x, self.projection, self.bias).split_with_sizes(self.widths, dim=-1)
        self.within(q, k, latents)()
        return q, k, v

    def within(self, q: Tensor, k: Tensor, latents: Tensor) -> Callable[[], object]:
        """What remains to be done, in place, each time a product has been put into these parts of it."""
        if not self.widths[2]:
            return _nothing
        return self.couple(self._by_group(q), self._by_group(k), self._by_group(latents))

    def couple(self, q: Tensor, k: Tensor, latents: Tensor) -> Callable[[], object]:
        """What couples (G, N, R·D) and (G, N, D) in place, with latents (G, N, …) from the product."""
        raise NotImplementedError

    def _by_group(self, part: Tensor) -> Tensor:
        """The same numbers by group: (G, N, …)."""
        groups = self.heads.n_k
        if part.numel() == part.shape[-1]:  # one token
            return part.view(groups, 1, -1)
        return part.view(-1, groups, part.shape[-1] // groups).transpose(0, 1)


@dataclass(frozen=True)
class AsEver(AtRest):
    """Any coupling: queries and keys from one product, then its own forward pass."""

    coupling: Coupling

    def within(self, q: Tensor, k: Tensor, latents: Tensor) -> Callable[[], object]:
        by_head = [part.unflatten(-1, (-1, self.heads.head_dim)) for part in (q, k)]

        def run() -> None:
            for part, coupled in zip(by_head, self.coupling(*by_head), strict=True):
                part.copy_(coupled)

        return run


def plain(qk: FactorizedQK) -> tuple[HeadShapes, Tensor, Tensor | None]:
    """Both projections as one."""
    bias = None if qk.q.bias is None else torch.cat((qk.q.bias, qk.k.bias)).detach()
    return qk.head_shapes, for_products(torch.cat((qk.q.weight, qk.k.weight))), bias


@torch.no_grad()
def drift_at_rest(coupling: Drift, qk: FactorizedQK) -> AtRest:
    """The drift is linear, so the product is all there is."""
    weight, bias = qk.drifted_query_projection(coupling.steps * coupling.step.per_head())
    together = None if bias is None else torch.cat((bias, qk.k.bias))
    return AtRest(coupling.head_shapes, for_products(torch.cat((weight, qk.k.weight))), together)


@dataclass(frozen=True)
class LatentAtRest(AtRest):
    """The trajectory of `latent`, tokens first. The place u_j is moved by the kicks before it.

    to_key  what the kicks at all places add to a group's key (G, places·ρ, D)
    to_keys  the same for all groups at once, block-diagonal: where one kick is all, and this is small
    to_query  and to its queries (G, places·ρ, R·D), if anything
    mixes   by place, what the kicks before it add to u (G, j·ρ, ρ)
    drifts  0, 1, …, one a place, where there are more than the two that the product yields
    pulls   what b2 adds to u by then (G, 1, places, ρ)
    """

    rule: Rule
    to_key: Tensor
    to_keys: Tensor | None
    to_query: Tensor | None
    mixes: list[Tensor | None]
    drifts: Tensor | None
    pulls: Tensor | None

    def within(self, q: Tensor, k: Tensor, latents: Tensor) -> Callable[[], object]:
        to_keys = self.to_keys
        if to_keys is None or latents.numel() != latents.shape[-1]:
            return super().within(q, k, latents)
        # one token is over so soon that a batched product, and each look at a tensor, would be felt
        keys, kicks = k.view(1, -1), latents.view(1, -1)
        return lambda: keys.addmm_(self.rule.kick_(kicks), to_keys)

    def couple(self, q: Tensor, k: Tensor, latents: Tensor) -> Callable[[], object]:
        count = len(self.mixes)
        latent = self.to_key.shape[1] // count
        if self.drifts is None:
            kicks = latents
        else:
            ends = latents.unflatten(2, (2, latent))
            first, last, places = ends[:, :, :1], ends[:, :, 1:], q.new_empty(*q.shape[:2], count, latent)
            kicks = places.flatten(2)
        cuts = [(kicks[..., : n * latent], kicks[..., n * latent : (n + 1) * latent]) for n in range(count)]

        def run() -> None:
            if self.drifts is not None:
                torch.lerp(first, last, self.drifts, out=places)
                if self.pulls is not None:
                    places.add_(self.pulls)
            for mix, (before, place) in zip(self.mixes, cuts, strict=True):
                if mix is not None:
                    place.baddbmm_(before, mix)
                self.rule.kick_(place)
            k.baddbmm_(kicks, self.to_key)
            if self.to_query is not None:
                q.baddbmm_(kicks, self.to_query)

        return run


@torch.no_grad()
def latent_at_rest(coupling: LatentCoupling, qk: FactorizedQK) -> LatentAtRest:
    heads, w = coupling.head_shapes, coupling.weights()
    rule, groups, size = w.rule, heads.n_k, heads.head_dim
    plain, key = (qk.q.weight, qk.q.bias), (qk.k.weight, qk.k.bias)
    drifted, before = (
        (plain, qk.drifted_query_projection(-w.total))
        if coupling.folded
        else (qk.drifted_query_projection(w.total), plain)
    )

    u = _through(w.w1.view(heads.n_q, -1, size), *before, groups)
    _add_bias(u, w.b1)
    latents = [u]
    if rule.moves:
        latents.append(u + w.rows * _through(w.w1, *key, groups))
    queries, keys = (_rows(*part, groups) for part in (drifted, key))
    if w.bias is not None and w.pull is not None:  # what b2 does to the end of the path is the same for all
        reach = rule.reach(rule.steps) / rule.steps * w.total[:, None]
        ends = reach * w.bias.repeat_interleave(heads.group_size, dim=0)
        _add_bias(queries, ends.reshape(groups, -1, 1))
        _add_bias(keys, rule.steps * w.bias.unsqueeze(-1))
        if rule.moves == 1:
            _add_bias(latents[1], rule.reach(1) * w.pull)
    parts = (queries, keys, torch.cat(latents, dim=1))
    everything = torch.cat([part.flatten(0, 1) for part in parts])
    biased = any(part is not None for part in (qk.q.bias, w.b1, w.bias))

    more = rule.moves > 1
    numbers = torch.arange(rule.moves + 1, device=u.device, dtype=u.dtype)
    reaches = torch.tensor([rule.reach(j) for j in range(rule.moves + 1)], device=u.device, dtype=u.dtype)
    to_query = w.exit_q.view(groups, heads.group_size, -1, size).transpose(1, 2).flatten(2)
    to_key = torch.cat([kick * w.exit_k for kick in rule.kicks()], dim=1)
    small = groups * to_key.numel() <= LARGEST_BLOCK_DIAGONAL
    back = w.mix.transpose(1, 2)
    return LatentAtRest(
        heads,
        for_products(everything[:, :-1]),
        everything[:, -1].contiguous() if biased else None,
        rule,
        to_key=to_key,
        to_keys=torch.block_diag(*to_key) if not rule.moves and small else None,
        to_query=_stacked(rule.areas(rule.steps), to_query),
        mixes=[_stacked(rule.areas(place)[:place], back) for place in range(rule.moves + 1)],
        drifts=numbers[:, None] if more else None,
        pulls=(reaches[:, None] * w.pull.transpose(1, 2)).unsqueeze(1)
        if more and w.pull is not None
        else None,
    )


Rows = tuple[Tensor, Tensor | None]  # a matrix a group, and its bias


@dataclass(frozen=True)
class AffineAtRest(AtRest):
    """The affine coupling, tokens first; the first latents come out of the projection.

    Each query has a network of its own, so the matrices of a group are block diagonal: some zeros are
    multiplied, and nothing has to be rearranged.

    to_key      scale and shift that a group's latents give its key, each (G, ρ, D) and (G, 1, D)
    from_key    W1 of what listens to a key (G, D, ρ) and its bias (G, 1, ρ)
    to_query    scale and shift of a group's queries, each (G, ρ, R·D) and (G, 1, R·D)
    from_query  W1 of what listens to the queries (G, R·D, ρ) and its bias: for steps after the first
    """

    steps: int
    bound: float
    to_key: tuple[Rows, Rows]
    from_key: Rows
    to_query: tuple[Rows, Rows]
    from_query: Rows

    def couple(self, q: Tensor, k: Tensor, latents: Tensor) -> Callable[[], object]:
        def run() -> None:
            for step in range(self.steps):
                u = _affine(q, self.from_query) if step else latents
                self._move(k, F.silu(u), *self.to_key)
                self._move(q, F.silu(_affine(k, self.from_key)), *self.to_query)

        return run

    def _move(self, target: Tensor, latent: Tensor, scale: Rows, shift: Rows) -> None:
        """target⊙exp(bound·tanh(s)) + t, in place."""
        bent = _affine(latent, scale).tanh_()
        if self.bound != 1:
            bent *= self.bound
        target.mul_(bent.exp_()).baddbmm_(latent, shift[0])
        if shift[1] is not None:
            target += shift[1]


@torch.no_grad()
def affine_at_rest(coupling: Affine, qk: FactorizedQK) -> AffineAtRest:
    heads, speaks, hears = coupling.head_shapes, coupling.from_query, coupling.from_key
    groups, group = heads.n_k, heads.group_size

    def by_query(parameter: Tensor) -> Tensor:
        """(H or 1, …) -> (G, R, …)."""
        return parameter.expand(heads.n_q, *parameter.shape[1:]).unflatten(0, (groups, group))

    def row(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.flatten(1).unsqueeze(1)

    def said(network: HeadNetworks, to_key: bool) -> tuple[Rows, Rows]:
        """Scale and shift: a key hears the mean of its group, a query its own network."""
        parts = []
        biases = (None, None) if network.b2 is None else by_query(network.b2).chunk(2, dim=-1)
        for matrix, bias in zip(by_query(network.w2).transpose(2, 3).chunk(2, dim=-1), biases, strict=True):
            if to_key:
                mean = None if bias is None else bias.mean(1, keepdim=True)
                parts.append((matrix.flatten(1, 2) / group, mean))
            else:
                parts.append((_block_diagonal(matrix), row(bias)))
        return parts[0], parts[1]

    w1, b1 = by_query(speaks.w1), None if speaks.b1 is None else by_query(speaks.b1)
    inner = None if hears.b1 is None else by_query(hears.b1)
    query, key = _rows(qk.q.weight, qk.q.bias, groups), _rows(qk.k.weight, qk.k.bias, groups)
    latent = _through(w1.flatten(0, 1), qk.q.weight, qk.q.bias, groups)
    if b1 is not None:
        _add_bias(latent, b1.reshape(groups, -1, 1))
    everything = torch.cat([part.flatten(0, 1) for part in (query, key, latent)])
    return AffineAtRest(
        heads,
        for_products(everything[:, :-1]),
        everything[:, -1].contiguous() if qk.q.bias is not None or b1 is not None else None,
        coupling.steps,
        coupling.bound,
        to_key=said(speaks, to_key=True),
        from_key=(by_query(hears.w1).flatten(1, 2).transpose(1, 2).contiguous(), row(inner)),
        to_query=said(hears, to_key=False),
        from_query=(_block_diagonal(w1.transpose(2, 3)), row(b1)),
    )


def _nothing() -> None:
    pass


def _block_diagonal(blocks: Tensor) -> Tensor:
    """(G, R, a, b) -> (G, R·a, R·b)."""
    groups, count, a, b = blocks.shape
    out = blocks.new_zeros(groups, count, a, count, b)
    out.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
    return out.view(groups, count * a, count * b)


def _affine(x: Tensor, rows: Rows) -> Tensor:
    matrix, bias = rows
    return torch.bmm(x, matrix) if bias is None else torch.baddbmm(bias, x, matrix)


def _rows(weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """A projection's rows by group, its bias as one more column: (G, rows, width + 1)."""
    column = weight.new_zeros(len(weight), 1) if bias is None else bias.unsqueeze(-1)
    return torch.cat((weight, column), dim=-1).unflatten(0, (groups, -1))


def _through(w1: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """The rows of W1·W for W1 (heads, r, D) and a projection to as many heads, by group."""
    return (w1 @ _rows(weight, bias, len(w1))).reshape(groups, -1, weight.shape[-1] + 1)


def _add_bias(rows: Tensor, bias: Tensor | None) -> None:
    """Add (G, rows, 1) to the column of biases, in place."""
    if bias is not None:
        rows[..., -1:] += bias


def _stacked(shares: list[float], matrix: Tensor) -> Tensor | None:
    """What the kicks at some places do, one below the other; None where none of them counts."""
    return torch.cat([share * matrix for share in shares], dim=1) if any(shares) else None


def for_products(weight: Tensor) -> Tensor:
    """The matrix, laid out in memory so that its product with a vector is quick.

    Row by row the kernel makes one sum after the other, which for short rows never gets going; a matrix with
    more rows than columns is better stored column by column.
    """
    weight = weight.detach()
    return weight.t().contiguous().t() if weight.shape[0] > weight.shape[1] else weight.contiguous()
