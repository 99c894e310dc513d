"""Attention: project → couple → rotate → score → write."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qkflow.attention import couplings, scorings
from qkflow.attention.heads import HeadShapes
from qkflow.attention.init import InitScheme, ParamSampler, initialize
from qkflow.attention.kv_cache import KVCache
from qkflow.attention.masks import Mask, build_mask, document_positions
from qkflow.attention.projections import FactorizedQK, build_circuits, circuit_head_shapes
from qkflow.attention.registry import Spec
from qkflow.attention.rope import RotaryEmbedding, Rotation, apply_rope, check_head_dim
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
        dim: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        coupling: str | Spec = "none",
        scoring: str | Spec = "softmax",
        circuit: str = "FAFO",
        bias: bool = False,
        qk_norm: bool = False,
        rope: RotaryEmbedding | dict[str, Any] | bool | None = True,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        init: str | InitScheme = "gpt2",
        seed: int | None = None,
        layer_idx: int = 0,
        n_layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        _check_shape(dim, n_heads, n_kv_heads, head_dim, window, dropout)
        head_dim = dim // n_heads if head_dim is None else head_dim
        rope = RotaryEmbedding.from_option(rope)
        if rope is not None:
            check_head_dim(head_dim)
        if circuit != "FAFO":
            _check_collapsed(circuit, rope, scorings.check(scoring), qk_norm)
        self.dim, self.causal, self.window, self.dropout = dim, causal, window, dropout
        self.rope = rope
        self.scale = head_dim**-0.5
        self.coupling_spec = couplings.check(coupling)
        scoring_spec = scorings.check(scoring)
        standard = scorings.get(scoring_spec.name).head_shapes(n_heads, n_kv_heads, head_dim)
        self.head_shapes: HeadShapes = circuit_head_shapes(circuit, dim, standard)
        self.qk, self.ov = build_circuits(circuit, dim, self.head_shapes, bias, **where)
        self.coupling = couplings.build(self.coupling_spec, self.head_shapes, where)
        self.scoring = scorings.build(scoring_spec, self.head_shapes, dim, layer_idx, where)
        size = self.head_shapes.head_dim
        self.q_norm = nn.RMSNorm(size, eps=1e-6, **where) if qk_norm else None
        self.k_norm = nn.RMSNorm(size, eps=1e-6, **where) if qk_norm else None
        initialize(self, init, seed=seed, n_layers=n_layers)

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
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
        q, k, v = self.project_qkv(x, context, positions, document_ids, cache, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        if mask is None:
            mask = self.make_mask(x.shape[1], k.shape[1], attention_mask, document_ids, x.device, x.shape[0])
        dropout = self.dropout if self.training else 0.0
        gathered = self.scoring(q, k, v, mask=mask, scale=self.scale, dropout=dropout, x=x)
        return self.ov.project_output(gathered)

    def reference(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The textbook form of the whole layer: its output and its weights (B, heads, T, S)."""
        q, k, v = self.project_qkv(x, context, positions, document_ids, None, None, use_reference=True)
        mask = self.make_mask(x.shape[1], k.shape[1], attention_mask, document_ids, x.device, x.shape[0])
        gathered, weights = self.scoring.reference(q, k, v, mask=mask, scale=self.scale, x=x)
        return self.ov.project_output(gathered), weights

    def project_qkv(
        self,
        x: Tensor,
        context: Tensor | None,
        positions: Tensor | None,
        document_ids: Tensor | None,
        cache: KVCache | None,
        rotation: Rotation | None,
        use_reference: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project, couple, normalise, rotate."""
        self._check_input(x, context)
        source = x if context is None else context
        if use_reference:
            q, k = self.coupling.reference(*self.qk(x, source))
        elif context is None and isinstance(self.qk, FactorizedQK):
            in_midst = cache is not None and cache.length > 0
            q, k = self.coupling.from_input(x, self.qk, in_midst=in_midst)
        else:
            q, k = self.coupling(*self.qk(x, source))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if rotation is None:
                past = 0 if cache is None else cache.length
                rotation = self.make_rotation(x, positions, document_ids, past)
            assert rotation is not None
            q, k = apply_rope(q, rotation), apply_rope(k, rotation)
        return q, k, self.ov.project_values(source)

    def make_rotation(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_length: int = 0,
    ) -> Rotation | None:
        """The rotation of (B, T, …) tokens after `past` cached ones; None without rope."""
        if self.rope is None:
            return None
        length = x.shape[1]
        if positions is None:
            if document_ids is not None:
                positions = document_positions(document_ids)[:, -length:]
            else:
                positions = torch.arange(past_length, past_length + length, device=x.device)
        elif positions.shape[-1] != length:
            raise InputError(f"positions covers {positions.shape[-1]} tokens, but x has {length}")
        elif positions.dim() > 2 or (positions.dim() == 2 and positions.shape[0] not in (1, x.shape[0])):
            raise InputError(
                f"positions are (tokens) or (batch, tokens), here for {x.shape[0]} sequences, not "
                f"{tuple(positions.shape)}"
            )
        return self.rope.rotation(positions, self.head_shapes.head_dim, x.dtype)

    def make_mask(
        self,
        n_queries: int,
        n_keys: int,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        device: torch.device | None = None,
        batch_size: int | None = None,
    ) -> Mask:
        return build_mask(
            n_queries,
            n_keys,
            causal=self.causal,
            window=self.window,
            attention_mask=attention_mask,
            document_ids=document_ids,
            device=device,
            batch_size=batch_size,
        )

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache for this layer, on its device and in its precision."""
        if not self.causal:
            raise InputError("only causal attention can be decoded step by step: this layer is bidirectional")
        like = next(self.parameters())
        heads = self.head_shapes
        return KVCache(
            batch_size,
            capacity,
            heads.n_k,
            heads.head_dim,
            heads.n_v,
            heads.v_head_dim,
            like.device,
            like.dtype,
        )

    def merge(self) -> Attention:
        """Fold the linear part of the coupling into the projections, in place; outputs stay the same.

        A `drift` vanishes altogether and leaves plain standard attention.
        """
        if not isinstance(self.qk, FactorizedQK):
            raise InputError("a collapsed query-key circuit has no key projection to fold a drift into")
        folds = type(self.coupling).take_linear_drift is not couplings.Coupling.take_linear_drift
        if folds and not self.qk.is_plain:
            raise InputError(
                "something stands in the place of the query or key projection (an adapter, a hook), so no "
                "drift can be folded into its weights: merge or remove that first"
            )
        amount = self.coupling.take_linear_drift()
        if amount is None:
            return self
        self.qk.fold_drift(amount)
        if self.coupling_spec.name == "drift":
            self.coupling_spec = Spec("none")
            self.coupling = couplings.build(self.coupling_spec, self.head_shapes)
        else:
            self.coupling_spec = Spec(self.coupling_spec.name, {**self.coupling_spec.options, "folded": True})
        return self

    def init_parameters(self, sampler: ParamSampler) -> None:
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                nn.init.ones_(norm.weight)

    def _check_input(self, x: Tensor, context: Tensor | None) -> None:
        for name, given in (("x", x), ("context", context)):
            if given is not None and (given.dim() != 3 or given.shape[-1] != self.dim):
                raise InputError(
                    f"attention takes {name} of shape (batch, tokens, {self.dim}), not {tuple(given.shape)}"
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
        heads = self.head_shapes
        return (
            f"width={self.dim}, heads={heads.n_q}/{heads.n_k}/{heads.n_v}, size={heads.head_dim}, "
            f"coupling={self.coupling_spec}, scoring={self.scoring.name}"
        )


def merge(model: nn.Module) -> nn.Module:
    """Fold the drift of every attention layer of a model into its projections, in place.

    Modules that keep a config, and so have a method `sync_config`, are told, inner ones first.
    """
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Attention):
            module.merge()
    for module in reversed(modules):
        if hasattr(module, "sync_config"):
            module.sync_config()  # type: ignore[operator]
    return model


def _check_shape(
    dim: int, n_heads: int, n_kv_heads: int, head_dim: int | None, window: int | None, dropout: float
) -> None:
    if n_heads < 1 or n_kv_heads < 1 or dim < 1:
        raise InputError(f"width {dim}, heads {n_heads} and kv_heads {n_kv_heads} must all be at least 1")
    if head_dim is not None and head_dim < 1:
        raise InputError(f"the head size must be at least 1, not {head_dim}")
    if head_dim is None and dim % n_heads:
        raise InputError(
            f"width {dim} does not divide into {n_heads} heads: choose another, or give head_size"
        )
    if n_heads % n_kv_heads:
        raise InputError(
            f"{n_heads} heads cannot share {n_kv_heads} key/value heads evenly: one must divide the other"
        )
    if window is not None and window < 1:
        raise InputError(f"the window must hold at least one token, not {window}")
    if not 0 <= dropout < 1:
        raise InputError(f"dropout must lie in [0, 1), not {dropout}")


def _check_collapsed(circuit: str, rope: RotaryEmbedding | None, scoring: Spec, qk_norm: bool) -> None:
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
