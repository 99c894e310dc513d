"""Attention: project → couple → rotate → score → write."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qkflow.attention import couplings, scorings
from qkflow.attention.heads import Heads
from qkflow.attention.init import Draw, Start, initialise
from qkflow.attention.kv_cache import KVCache
from qkflow.attention.masks import Mask, build_mask, document_positions
from qkflow.attention.projections import FactorisedQK, build_circuits, circuit_heads
from qkflow.attention.registry import Spec
from qkflow.attention.rope import Rotary, Rotation, check_size, rotate
from qkflow.errors import InputError


class Attention(nn.Module):
    """Self-attention whose query and key may evolve together before they are scored.

        attention = Attention(512, heads=8, coupling="leapfrog:n=7")
        y = attention(x)                                    # (B, T, 512) -> (B, T, 512)

    width           size of the residual stream
    heads, kv_heads query heads, and key/value heads shared by groups of them (GQA; 1 = MQA)
    head_size       default width / heads
    coupling        e.g. "none", "drift", "euler", "leapfrog:n=7:conservative=true", "affine"
    scoring         "softmax", "differential" or "differential_v2"
    circuit         "FAFO", or with a collapsed QK and/or OV: "CAFO", "FACO", "CACO"
    rope            True, False, or the fields of `Rotary` (base, scaling, …)
    causal, window  who sees whom; a query sees at most the `window` nearest tokens
    start, seed     how parameters start (see `starts`)
    layer, layers   this layer's number from 0 and how many there are, for starts that depend on depth
    """

    roles: ClassVar[dict[str, str]] = {
        "coupling": "coupling",
        "scoring": "scoring",
        "q_norm": "qk_norm",
        "k_norm": "qk_norm",
    }

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        coupling: str | Spec = "none",
        scoring: str | Spec = "softmax",
        circuit: str = "FAFO",
        bias: bool = False,
        qk_norm: bool = False,
        rope: Rotary | dict[str, Any] | bool | None = True,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        start: str | Start = "gpt2",
        seed: int | None = None,
        layer: int = 0,
        layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_heads = heads if kv_heads is None else kv_heads
        _check_shape(width, heads, kv_heads, head_size, window, dropout)
        head_size = width // heads if head_size is None else head_size
        rope = Rotary.of(rope)
        if rope is not None:
            check_size(head_size)
        if circuit != "FAFO":
            _check_collapsed(circuit, rope, scorings.check(scoring), qk_norm)
        self.width, self.causal, self.window, self.dropout = width, causal, window, dropout
        self.rope = rope
        self.scale = head_size**-0.5
        self.coupling_spec = couplings.check(coupling)
        scoring_spec = scorings.check(scoring)
        standard = scorings.get(scoring_spec.name).heads(heads, kv_heads, head_size)
        self.heads: Heads = circuit_heads(circuit, width, standard)
        self.qk, self.ov = build_circuits(circuit, width, self.heads, bias, **where)
        self.coupling = couplings.build(self.coupling_spec, self.heads, where)
        self.scoring = scorings.build(scoring_spec, self.heads, width, layer, where)
        size = self.heads.size
        self.q_norm = nn.RMSNorm(size, eps=1e-6, **where) if qk_norm else None
        self.k_norm = nn.RMSNorm(size, eps=1e-6, **where) if qk_norm else None
        initialise(self, start, seed=seed, layers=layers)

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        rotation: Rotation | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """(B, T, width) -> (B, T, width).

        positions  (T,) or (B, T); implied: 0, 1, …, going on from the cache, restarting with each document
        padding    (B, S), True at real tokens; documents (B, S), each token's document number (packed
                   sequences); both cover the tokens in the cache as well
        context    where keys and values come from, for cross-attention (uncoupled, without rope)
        rotation, mask   made once by `rotation_for` and `mask_for` and shared by all layers of a model
        """
        q, k, v = self._prepare(x, context, positions, documents, cache, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        if mask is None:
            mask = self.mask_for(x.shape[1], k.shape[1], padding, documents, x.device, x.shape[0])
        dropout = self.dropout if self.training else 0.0
        gathered = self.scoring(q, k, v, mask=mask, scale=self.scale, dropout=dropout, x=x)
        return self.ov.write(gathered)

    def reference(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The textbook form of the whole layer: its output and its weights (B, heads, T, S)."""
        q, k, v = self._prepare(x, context, positions, documents, None, None, textbook=True)
        mask = self.mask_for(x.shape[1], k.shape[1], padding, documents, x.device, x.shape[0])
        gathered, weights = self.scoring.reference(q, k, v, mask=mask, scale=self.scale, x=x)
        return self.ov.write(gathered), weights

    def _prepare(
        self,
        x: Tensor,
        context: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: KVCache | None,
        rotation: Rotation | None,
        textbook: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project, couple, normalise, rotate."""
        self._check_input(x, context)
        source = x if context is None else context
        if textbook:
            q, k = self.coupling.reference(*self.qk(x, source))
        elif context is None and isinstance(self.qk, FactorisedQK):
            in_midst = cache is not None and cache.length > 0
            q, k = self.coupling.from_input(x, self.qk, in_midst=in_midst)
        else:
            q, k = self.coupling(*self.qk(x, source))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if rotation is None:
                past = 0 if cache is None else cache.length
                rotation = self.rotation_for(x, positions, documents, past)
            assert rotation is not None
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, self.ov.values(source)

    def rotation_for(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        past: int = 0,
    ) -> Rotation | None:
        """The rotation of (B, T, …) tokens after `past` cached ones; None without rope."""
        if self.rope is None:
            return None
        length = x.shape[1]
        if positions is None:
            if documents is not None:
                positions = document_positions(documents)[:, -length:]
            else:
                positions = torch.arange(past, past + length, device=x.device)
        elif positions.shape[-1] != length:
            raise InputError(f"positions covers {positions.shape[-1]} tokens, but x has {length}")
        elif positions.dim() > 2 or (positions.dim() == 2 and positions.shape[0] not in (1, x.shape[0])):
            raise InputError(
                f"positions are (tokens) or (batch, tokens), here for {x.shape[0]} sequences, not "
                f"{tuple(positions.shape)}"
            )
        return self.rope.rotation(positions, self.heads.size, x.dtype)

    def mask_for(
        self,
        queries: int,
        keys: int,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        device: torch.device | None = None,
        batch: int | None = None,
    ) -> Mask:
        return build_mask(
            queries,
            keys,
            causal=self.causal,
            window=self.window,
            padding=padding,
            documents=documents,
            device=device,
            batch=batch,
        )

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for this layer, on its device and in its precision."""
        if not self.causal:
            raise InputError("only causal attention can be decoded step by step: this layer is bidirectional")
        like = next(self.parameters())
        heads = self.heads
        return KVCache(
            batch, capacity, heads.keys, heads.size, heads.values, heads.value_size, like.device, like.dtype
        )

    def merge(self) -> Attention:
        """Fold the linear part of the coupling into the projections, in place; outputs stay the same.

        A `drift` vanishes altogether and leaves plain standard attention.
        """
        if not isinstance(self.qk, FactorisedQK):
            raise InputError("a collapsed query-key circuit has no key projection to fold a drift into")
        folds = type(self.coupling).fold is not couplings.Coupling.fold
        if folds and not self.qk.plain:
            raise InputError(
                "something stands in the place of the query or key projection (an adapter, a hook), so no "
                "drift can be folded into its weights: merge or remove that first"
            )
        amount = self.coupling.fold()
        if amount is None:
            return self
        self.qk.fold_drift(amount)
        if self.coupling_spec.name == "drift":
            self.coupling_spec = Spec("none")
            self.coupling = couplings.build(self.coupling_spec, self.heads)
        else:
            self.coupling_spec = Spec(self.coupling_spec.name, {**self.coupling_spec.options, "folded": True})
        return self

    def start_parameters(self, draw: Draw) -> None:
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                nn.init.ones_(norm.weight)

    def _check_input(self, x: Tensor, context: Tensor | None) -> None:
        for name, given in (("x", x), ("context", context)):
            if given is not None and (given.dim() != 3 or given.shape[-1] != self.width):
                raise InputError(
                    f"attention takes {name} of shape (batch, tokens, {self.width}), not {tuple(given.shape)}"
                )
        if context is None:
            return
        if context.shape[0] != x.shape[0]:
            raise InputError(f"context holds {context.shape[0]} sequences, but x has {x.shape[0]}")
        if self.coupling_spec.name != "none":
            raise InputError(
                f"coupling '{self.coupling_spec.name}' needs a token's own query and key, and in "
                "cross-attention no token has both: use coupling='none'"
            )
        if self.causal or self.rope is not None:
            raise InputError("cross-attention has no shared positions: use causal=False and rope=False")

    def extra_repr(self) -> str:
        heads = self.heads
        return (
            f"width={self.width}, heads={heads.queries}/{heads.keys}/{heads.values}, size={heads.size}, "
            f"coupling={self.coupling_spec}, scoring={self.scoring.name}"
        )


def merge(model: nn.Module) -> nn.Module:
    """Fold the drift of every attention layer of a model into its projections, in place.

    Modules that keep a config, and so have a method `couplings_changed`, are told, inner ones first.
    """
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Attention):
            module.merge()
    for module in reversed(modules):
        if hasattr(module, "couplings_changed"):
            module.couplings_changed()  # type: ignore[operator]
    return model


def _check_shape(
    width: int, heads: int, kv_heads: int, head_size: int | None, window: int | None, dropout: float
) -> None:
    if heads < 1 or kv_heads < 1 or width < 1:
        raise InputError(f"width {width}, heads {heads} and kv_heads {kv_heads} must all be at least 1")
    if head_size is not None and head_size < 1:
        raise InputError(f"the head size must be at least 1, not {head_size}")
    if head_size is None and width % heads:
        raise InputError(
            f"width {width} does not divide into {heads} heads: choose another, or give head_size"
        )
    if heads % kv_heads:
        raise InputError(
            f"{heads} heads cannot share {kv_heads} key/value heads evenly: one must divide the other"
        )
    if window is not None and window < 1:
        raise InputError(f"the window must hold at least one token, not {window}")
    if not 0 <= dropout < 1:
        raise InputError(f"dropout must lie in [0, 1), not {dropout}")


def _check_collapsed(circuit: str, rope: Rotary | None, scoring: Spec, qk_norm: bool) -> None:
    if circuit.startswith("CA") and rope is not None:
        raise InputError(
            f"circuit '{circuit}' is one query-key matrix with no query and key to rotate: use rope=False"
        )
    if scoring.name != "softmax":
        raise InputError(f"collapsed circuit '{circuit}' works with softmax scoring, not '{scoring.name}'")
    if circuit.startswith("CA") and qk_norm:
        raise InputError(
            f"circuit '{circuit}' has no query and key projections to normalise: use qk_norm=False"
        )
