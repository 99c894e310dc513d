"""Attention: project → couple → rotate → score → output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from qkflow.attention import couplings, scorings
from qkflow.attention.checks import (
    check_attention_input,
    check_attention_shape,
    check_collapsed_circuit,
    check_qk_norm_gain,
)
from qkflow.attention.couplings.base import PreparedQK
from qkflow.attention.inference import PreparableModule
from qkflow.attention.init import InitScheme, ParamSampler, initialize
from qkflow.attention.kv_cache import KVCache
from qkflow.attention.masks import Mask, build_mask, document_positions
from qkflow.attention.projections import (
    FactorizedOV,
    FactorizedQK,
    HeadShapes,
    build_circuits,
    can_fuse,
    check_not_offloaded,
    circuit_head_shapes,
    has_no_hooks,
    is_autocast_enabled,
    is_plain_linear,
)
from qkflow.attention.registry import Spec
from qkflow.attention.rope import RotaryEmbedding, Rotation, apply_rope, check_head_dim
from qkflow.errors import InputError


class Attention(PreparableModule):
    """Self-attention whose query and key may evolve together before scoring.

        attention = Attention(512, n_heads=8, coupling="leapfrog:n=7")
        y = attention(x)                                    # (B, T, 512) -> (B, T, 512)

    dim                  size of the residual stream
    n_heads, n_kv_heads  query heads, and key/value heads shared by groups of them (GQA; 1 = MQA)
    head_dim             default dim / n_heads
    coupling             e.g. "none", "drift", "euler", "leapfrog:n=7:conservative=true", "affine"
    scoring              "softmax", "softmax_norm", "differential" or "differential_v2"
    circuit              "FAFO", or with a collapsed QK and/or OV circuit: "CAFO", "FACO", "CACO"
    qk_norm              RMSNorm of queries and keys, per head
    qk_norm_gain         "learned": the norms have weights; a number g: they have none, and scores are
                         multiplied by g
    rope                 True, False, or the fields of `RotaryEmbedding` (base, scaling, …)
    causal, window       attention mask; with a window, a query attends to the `window` nearest tokens
    init, seed           parameter init (see `qkflow.attention.init`)
    layer_idx, n_layers  index of this layer from 0, and number of layers, for inits that depend on depth
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
        qk_norm_gain: float | Literal["learned"] = "learned",
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
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_attention_shape(dim, n_heads, n_kv_heads, head_dim, window, dropout)
        check_qk_norm_gain(qk_norm_gain, qk_norm)
        head_dim = dim // n_heads if head_dim is None else head_dim
        rope = RotaryEmbedding.from_option(rope)
        if rope is not None:
            check_head_dim(head_dim)
        if circuit != "FAFO":
            check_collapsed_circuit(
                circuit, rope=rope is not None, scoring=scorings.check(scoring).name, qk_norm=qk_norm
            )
        self.dim, self.causal, self.window, self.dropout = dim, causal, window, dropout
        self.rope = rope
        self.scale = head_dim**-0.5 * (1.0 if qk_norm_gain == "learned" else qk_norm_gain)
        self.coupling_spec = couplings.check(coupling)
        scoring_spec = scorings.check(scoring)
        standard = scorings.get(scoring_spec.name).head_shapes(n_heads, n_kv_heads, head_dim)
        self.head_shapes: HeadShapes = circuit_head_shapes(circuit, dim, standard)
        self.qk, self.ov = build_circuits(circuit, dim, self.head_shapes, bias, **factory_kwargs)
        self.coupling = couplings.build(self.coupling_spec, self.head_shapes, factory_kwargs)
        self.scoring = scorings.build(scoring_spec, self.head_shapes, dim, layer_idx, factory_kwargs)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(
                self.head_shapes.head_dim,
                eps=1e-6,
                elementwise_affine=qk_norm_gain == "learned",
                **factory_kwargs,
            )
            if qk_norm
            else None
            for _ in ("q", "k")
        )
        self._prepared: PreparedQK | None = None
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
        """Return (B, T, dim) for x (B, T, dim).

        positions       (T,) or (B, T); default 0, 1, …, after the cached tokens, restarting per document
        attention_mask  (B, S), True at real tokens and False at padding, as in `transformers`
        document_ids    (B, S), the document of each token in packed sequences; like the mask, it covers the
                        cached tokens too
        context         source of keys and values for cross-attention (no coupling, no rope)
        rotation, mask  from `make_rotation` and `make_mask`, shared by all layers of a model
        """
        q, k, v = self.project_qkv(
            x, context=context, positions=positions, document_ids=document_ids, cache=cache, rotation=rotation
        )
        if cache is not None:
            k, v = cache.append(k, v)
        if mask is None:
            mask = self.make_mask(x.shape[1], k.shape[1], attention_mask, document_ids, x.device, x.shape[0])
        dropout = self.dropout if self.training else 0.0
        out = self.scoring(q, k, v, mask=mask, scale=self.scale, dropout=dropout, x=x)
        return self.ov.project_output(out)

    def reference(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, dim) and the attention weights (B, heads, T, S) in the textbook form."""
        q, k, v = self.project_qkv(
            x, context=context, positions=positions, document_ids=document_ids, use_reference=True
        )
        mask = self.make_mask(x.shape[1], k.shape[1], attention_mask, document_ids, x.device, x.shape[0])
        out, weights = self.scoring.reference(q, k, v, mask=mask, scale=self.scale, x=x)
        return self.ov.project_output(out), weights

    def project_qkv(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        rotation: Rotation | None = None,
        use_reference: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v ready for scoring: projected, coupled, normalized, rotated."""
        check_attention_input(
            x,
            context,
            dim=self.dim,
            coupling=self.coupling_spec.name,
            causal=self.causal,
            rope=self.rope is not None,
        )
        q, k, v = self.project_and_couple(x, context, use_reference)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if rotation is None:
                past_length = 0 if cache is None else cache.length
                rotation = self.make_rotation(x, positions, document_ids, past_length)
            assert rotation is not None
            q, k = apply_rope(q, rotation), apply_rope(k, rotation)
        return q, k, v

    def project_and_couple(
        self, x: Tensor, context: Tensor | None = None, use_reference: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return coupled q, k and v, before norm and rope."""
        source = x if context is None else context
        regular = use_reference or context is not None or torch.is_grad_enabled() or is_autocast_enabled(x)
        if self._prepared is not None and not regular:
            q, k, v = self._prepared(x)
            return q, k, v.unflatten(-1, (self.head_shapes.n_v, self.head_shapes.v_head_dim))
        check_not_offloaded(next(self.coupling.parameters(), x), x, "Block")
        couple = self.coupling.reference if use_reference else self.coupling
        q, k = couple(*self.qk(x, source))
        return q, k, self.ov.project_values(source)

    def prepare_for_inference(self) -> Self:
        """Fuse the projections and the coupling's linear parts into one matmul, from the current weights.

        Undone by `.train()`, by loading weights, by moving the module and by `initialize`. Weights that are
        changed in any other way afterwards are not detected: call this again. Layers with collapsed circuits,
        adapters, hooks, sharded or quantized weights, or a coupling in another dtype keep the regular
        forward.
        """
        self.check_eval_mode()
        self.release_prepared()
        qk, ov = self.qk, self.ov
        if not (isinstance(qk, FactorizedQK) and isinstance(ov, FactorizedOV)):
            return self
        weight = qk.q.weight
        plain = qk.is_plain and has_no_hooks(qk) and is_plain_linear(ov.v)
        if not plain or weight.is_meta or not can_fuse(self.coupling, weight.dtype):
            return self
        prepared = self.coupling.prepare_for_inference(qk)
        self._prepared = None if prepared is None else prepared.with_values(ov.v)
        return self

    def release_prepared(self) -> None:
        self._prepared = None

    @property
    def is_prepared(self) -> bool:
        return self._prepared is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}  # a copy has its own parameters: prepare it again

    def make_rotation(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_length: int = 0,
    ) -> Rotation | None:
        """Return the rotation of tokens (B, T, …) after `past_length` cached ones; None without rope."""
        if self.rope is None:
            return None
        length = x.shape[1]
        if positions is None:
            if document_ids is not None:
                positions = document_positions(document_ids)[:, -length:]
            else:
                positions = torch.arange(past_length, past_length + length, device=x.device)
        elif positions.shape[-1] != length:
            raise InputError(
                f"positions has {positions.shape[-1]} tokens, but x has {length}", code="positions-length"
            )
        elif positions.dim() > 2 or (positions.dim() == 2 and positions.shape[0] not in (1, x.shape[0])):
            raise InputError(
                f"positions must have the shape (tokens) or ({x.shape[0]}, tokens), not "
                f"{tuple(positions.shape)}",
                code="positions-shape",
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
        """Return the mask of the last `n_queries` of `n_keys` tokens."""
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
        """Return an empty cache for this layer, on its device and in its dtype."""
        if not self.causal:
            raise InputError(
                "a bidirectional layer cannot decode incrementally: use causal=True", code="cache-not-causal"
            )
        like, shapes = next(self.parameters()), self.head_shapes
        sizes = (shapes.n_k, shapes.head_dim, shapes.n_v, shapes.v_head_dim)
        return KVCache(batch_size, capacity, *sizes, like.device, like.dtype)

    def merge(self) -> Self:
        """Fold a linear coupling into the query projection, in place: plain attention with equal outputs."""
        self.check_mergeable()
        if self.coupling_spec.name == "none":
            return self
        drift = self.coupling.linear_drift()
        assert drift is not None
        assert isinstance(self.qk, FactorizedQK)
        self.qk.fold_drift(drift)
        self.coupling_spec = Spec("none")
        self.coupling = couplings.build(self.coupling_spec, self.head_shapes)
        self.release_prepared()
        return self

    def check_mergeable(self) -> None:
        """Raise if `merge` cannot fold the coupling."""
        if self.coupling_spec.name == "none":
            return
        if self.coupling.linear_drift() is None:
            raise InputError(
                f"cannot merge: coupling '{self.coupling_spec}' is not linear; only a linear drift folds "
                "into the query projection",
                code="merge-not-linear",
            )
        if not isinstance(self.qk, FactorizedQK):
            raise InputError(
                "cannot merge: a collapsed circuit has no key projection", code="merge-collapsed-circuit"
            )
        if not self.qk.is_plain:
            raise InputError(
                "cannot merge: the query or key projection has an adapter or a hook; merge or remove it "
                "first",
                code="merge-projection-not-plain",
            )

    def init_parameters(self, sampler: ParamSampler) -> None:
        self.release_prepared()
        for norm in (self.q_norm, self.k_norm):
            if norm is not None and norm.elementwise_affine:
                nn.init.ones_(norm.weight)

    def extra_repr(self) -> str:
        shapes = self.head_shapes
        return (
            f"dim={self.dim}, n_heads={shapes.n_q}/{shapes.n_k}/{shapes.n_v}, head_dim={shapes.head_dim}, "
            f"coupling={self.coupling_spec}, scoring={self.scoring.name}"
        )


def attention_layers(model: nn.Module) -> list[Attention]:
    """Return all attention layers of a model."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def merge(model: nn.Module) -> nn.Module:
    """Fold every linear coupling of a model into its projections, in place.

    Layers without a coupling stay as they are. Modules with a config are updated through `sync_config`.
    """
    layers = attention_layers(model)
    for layer in layers:  # check all before changing any
        layer.check_mergeable()
    for layer in layers:
        layer.merge()
    for module in reversed(list(model.modules())):
        if hasattr(module, "sync_config"):
            module.sync_config()  # type: ignore[operator]
    return model


@contextmanager
def prepared_for_inference(model: nn.Module) -> Iterator[None]:
    """Prepare all attention layers for the duration of the block; those already prepared stay so."""
    layers = [layer for layer in attention_layers(model) if not layer.is_prepared]
    try:
        for layer in layers:
            layer.prepare_for_inference()
        yield
    finally:
        for layer in layers:
            layer.release_prepared()
