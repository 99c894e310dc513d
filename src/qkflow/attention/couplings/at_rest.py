"""Couplings at rest: in inference weights stand still, so products of them are made once.

One token passes through a layer in a few hundred microseconds, most of them spent on reading weights; every
small operation counts. So one product with a prepared matrix yields queries, keys and all latents, with the
drift, the step sizes and every bias inside it. Queries and keys of a group lie side by side, and the
trajectory ends with one batched product that is added to both in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.heads import Heads

if TYPE_CHECKING:
    from qkflow.attention.circuits import FactorisedQK
    from qkflow.attention.couplings.affine import Affine
    from qkflow.attention.couplings.base import Coupling, HeadNetworks
    from qkflow.attention.couplings.latent import LatentCoupling
    from qkflow.attention.couplings.trajectory import Rule


@dataclass(frozen=True)
class AtRest:
    """Projection and coupling as one product (`projection`, `bias`) and what remains to be done with it.

    The product's first (H+G)·D columns become the queries and keys; as it stands, this is no coupling.
    """

    heads: Heads
    projection: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The coupled (q, k) of tokens x (B, T, width)."""
        wide = F.linear(x, self.projection, self.bias)
        tokens = wide.view(-1, wide.shape[-1])
        self.within(tokens)()
        q, k = self.parted(tokens)
        return q.flatten(1, 2).unflatten(0, x.shape[:2]), k.unflatten(0, x.shape[:2])

    def within(self, wide: Tensor) -> Callable[[], None]:
        """What remains to be done, in place, each time products (N, rows) have been put into `wide`."""
        return lambda: None

    def parted(self, wide: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the queries (N, G, R, D) and keys (N, G, D)."""
        heads, queries = self.heads, self.heads.queries * self.heads.size
        return (
            wide[:, :queries].view(-1, heads.keys, heads.group, heads.size),
            wide[:, queries : queries + heads.keys * heads.size].view(-1, heads.keys, heads.size),
        )


@dataclass(frozen=True)
class AsEver(AtRest):
    """Any coupling: queries and keys from one product, then its own forward pass."""

    coupling: Coupling

    def within(self, wide: Tensor) -> Callable[[], None]:
        q, k = self.parted(wide)

        def run() -> None:
            for part, coupled in zip((q, k), self.coupling(q.flatten(1, 2)[None], k[None]), strict=True):
                part.copy_(coupled.view(part.shape))

        return run


def plain(qk: FactorisedQK) -> tuple[Heads, Tensor, Tensor | None]:
    """Both projections as one."""
    bias = None if qk.q.bias is None else torch.cat((qk.q.bias, qk.k.bias)).detach()
    return qk.heads, torch.cat((qk.q.weight, qk.k.weight)).detach(), bias


@dataclass(frozen=True)
class LatentAtRest(AtRest):
    """The trajectory of `latent`, tokens first. The place u_j is moved by the kicks before it.

    exit    what the kicks at all places add to a group's queries and key (G, places·ρ, (R+1)·D)
    mixes   by place, what the kicks before it add to u (G, j·ρ, ρ)
    drifts  0, 1, …, one a place, where there are more than the two that the product yields
    pulls   what b2 adds to u by then (G, places, ρ)
    """

    rule: Rule
    exit: Tensor
    mixes: list[Tensor | None]
    drifts: Tensor | None
    pulls: Tensor | None

    def within(self, wide: Tensor) -> Callable[[], None]:
        groups, _, width = self.exit.shape
        count, latent = len(wide), self.exit.shape[1] // len(self.mixes)
        tokens = wide[:, : groups * width].view(count, groups, width).transpose(0, 1)
        ends = wide[:, groups * width :].view(count, groups, -1, latent)
        places = ends if self.drifts is None else wide.new_empty(count, groups, len(self.mixes), latent)
        first, last = ends[:, :, :1], ends[:, :, 1:]
        kicks = places.view(count, groups, -1).transpose(0, 1)
        stops = [
            (mix, kicks[..., : number * latent], kicks[..., number * latent : (number + 1) * latent])
            for number, mix in enumerate(self.mixes)
        ]

        def run() -> None:
            if self.drifts is not None:
                torch.lerp(first, last, self.drifts, out=places)
                if self.pulls is not None:
                    places.add_(self.pulls)
            for mix, before, place in stops:
                if mix is not None:
                    place.baddbmm_(before, mix)
                self.rule.kick_(place)
            tokens.baddbmm_(kicks, self.exit)

        return run

    def parted(self, wide: Tensor) -> tuple[Tensor, Tensor]:
        """The queries of each group lie before its key."""
        heads = self.heads
        columns = (heads.queries + heads.keys) * heads.size
        tokens = wide[:, :columns].view(-1, heads.keys, heads.group + 1, heads.size)
        return tokens[:, :, :-1], tokens[:, :, -1]


@torch.no_grad()
def latent_at_rest(coupling: LatentCoupling, qk: FactorisedQK) -> LatentAtRest:
    heads, w = coupling.heads, coupling.weights()
    rule, groups, size = w.rule, heads.keys, heads.size
    plain, key = (qk.q.weight, qk.q.bias), (qk.k.weight, qk.k.bias)
    drifted, before = (plain, qk.drifted(-w.total)) if coupling.folded else (qk.drifted(w.total), plain)

    u = _through(w.w1.view(heads.queries, -1, size), *before, groups)
    _add_bias(u, w.b1)
    latents = [u]
    if rule.moves:
        latents.append(u + w.rows * _through(w.w1, *key, groups))
    queries, keys = (_rows(*part, groups) for part in (drifted, key))
    if w.bias is not None and w.pull is not None:  # what b2 does to the end of the path is the same for all
        reach = rule.reach(rule.steps) / rule.steps * w.total[:, None]
        ends = reach * w.bias.repeat_interleave(heads.group, dim=0)
        _add_bias(queries, ends.reshape(groups, -1, 1))
        _add_bias(keys, rule.steps * w.bias.unsqueeze(-1))
        if rule.moves == 1:
            _add_bias(latents[1], rule.reach(1) * w.pull)
    tokens = torch.cat((queries, keys), dim=1).flatten(0, 1)
    everything = torch.cat((tokens, torch.cat(latents, dim=1).flatten(0, 1)))
    biased = any(part is not None for part in (qk.q.bias, w.b1, w.bias))

    more = rule.moves > 1
    numbers = torch.arange(rule.moves + 1, device=u.device, dtype=u.dtype)
    reaches = torch.tensor([rule.reach(j) for j in range(rule.moves + 1)], device=u.device, dtype=u.dtype)
    to_query = w.exit_q.view(groups, heads.group, -1, size).transpose(1, 2).flatten(2)
    back = w.mix.transpose(1, 2)
    return LatentAtRest(
        heads,
        everything[:, :-1].contiguous(),
        everything[:, -1].contiguous() if biased else None,
        rule,
        exit=torch.cat(
            [
                torch.cat((area * to_query, kick * w.exit_k), dim=-1)
                for area, kick in zip(rule.areas(rule.steps), rule.kicks(), strict=True)
            ],
            dim=1,
        ),
        mixes=[_stacked(rule.areas(place)[:place], back) for place in range(rule.moves + 1)],
        drifts=numbers[:, None] if more else None,
        pulls=reaches[:, None] * w.pull.transpose(1, 2) if more and w.pull is not None else None,
    )


@dataclass(frozen=True)
class AffineAtRest(AtRest):
    """The affine coupling, tokens first; the first latents come out of the projection.

    to_key      scale and shift that a group's latents give its key (G, ρ, 2D); its biases (G, 1, 2D)
    from_key    W1 of what listens to a key (G, D, R·r); its biases (G, 1, R·r)
    to_query    scale and shift of each query (H, r, 2D), and biases
    from_query  W1 of what listens to a query (H, D, r), and biases: for steps after the first
    """

    steps: int
    bound: float
    to_key: tuple[Tensor, Tensor | None]
    from_key: tuple[Tensor, Tensor | None]
    to_query: tuple[Tensor, Tensor | None]
    from_query: tuple[Tensor, Tensor | None]
    sizes: list[int]  # rows of the product that are queries, keys and latents

    def within(self, wide: Tensor) -> Callable[[], None]:
        heads, parts = self.heads, wide.split(self.sizes, dim=1)
        counts = (heads.queries, heads.keys, heads.keys)
        q, k, u = (part.view(len(wide), n, -1).transpose(0, 1) for part, n in zip(parts, counts, strict=True))
        heard = wide.new_empty(heads.keys, len(wide), self.from_key[0].shape[-1])
        move_key, move_query = self._mover(k, *self.to_key), self._mover(q, *self.to_query)

        def run() -> None:
            for step in range(self.steps):
                spoken = self._gathered(_affine(q, *self.from_query)) if step else u
                move_key(F.silu(spoken, inplace=True))
                move_query(self._shared_out(F.silu(_affine(k, *self.from_key, out=heard), inplace=True)))

        return run

    def _gathered(self, u: Tensor) -> Tensor:
        """(H, N, r) -> (G, N, R·r)."""
        if self.heads.group == 1:
            return u
        return u.unflatten(0, (-1, self.heads.group)).transpose(1, 2).flatten(2)

    def _shared_out(self, u: Tensor) -> Tensor:
        """(G, N, R·r) -> (H, N, r)."""
        if self.heads.group == 1:
            return u
        return u.unflatten(-1, (self.heads.group, -1)).permute(0, 2, 1, 3).flatten(0, 1)

    def _mover(self, target: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], None]:
        """Scales and shifts `target` (heads, N, D) as latents say."""
        said = target.new_empty(*target.shape[:2], weight.shape[-1])
        scale, shift = said.chunk(2, dim=-1)

        def move(latent: Tensor) -> None:
            _affine(latent, weight, bias, out=said)
            scale.tanh_()
            if self.bound != 1:
                scale.mul_(self.bound)
            torch.addcmul(shift, target, scale.exp_(), out=target)

        return move


@torch.no_grad()
def affine_at_rest(coupling: Affine, qk: FactorisedQK) -> AffineAtRest:
    heads, speaks, hears = coupling.heads, coupling.from_query, coupling.from_key
    groups, share = heads.keys, 1 / heads.group
    w1 = speaks.per_head(speaks.w1)
    b1 = None if speaks.b1 is None else speaks.per_head(speaks.b1)
    query, key = _rows(qk.q.weight, qk.q.bias, groups), _rows(qk.k.weight, qk.k.bias, groups)
    latent = _through(w1, qk.q.weight, qk.q.bias, groups)
    if b1 is not None:
        _add_bias(latent, b1.reshape(groups, -1, 1))
    parts = [part.flatten(0, 1) for part in (query, key, latent)]
    everything = torch.cat(parts)

    def rows(network: HeadNetworks, group: int, share: float) -> tuple[Tensor, Tensor | None]:
        joined = share * network.per_head(network.w2).transpose(1, 2)
        joined = joined.reshape(len(joined) // group, -1, joined.shape[-1])
        if network.b2 is None:
            return joined, None
        said = share * network.per_head(network.b2)
        return joined, said.view(-1, group, 1, said.shape[-1]).sum(1)

    def ears(network: HeadNetworks, group: int) -> tuple[Tensor, Tensor | None]:
        inner = network.per_head(network.w1)
        matrix = inner.reshape(len(inner) // group, -1, inner.shape[-1]).transpose(1, 2).contiguous()
        if network.b1 is None:
            return matrix, None
        return matrix, network.per_head(network.b1).reshape(len(matrix), 1, -1)

    return AffineAtRest(
        heads,
        everything[:, :-1].contiguous(),
        everything[:, -1].contiguous() if qk.q.bias is not None or b1 is not None else None,
        coupling.steps,
        coupling.bound,
        to_key=rows(speaks, heads.group, share),
        from_key=ears(hears, heads.group),
        to_query=rows(hears, 1, 1.0),
        from_query=ears(speaks, 1),
        sizes=[len(part) for part in parts],
    )


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight, out=out)
    return torch.baddbmm(bias, x, weight, out=out)


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


def _stacked(areas: list[float], back: Tensor) -> Tensor | None:
    """Mixing matrices of the kicks before a place, one below the other; None where none of them counts."""
    return torch.cat([area * back for area in areas], dim=1) if any(areas) else None
