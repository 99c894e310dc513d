"""The qkflow decoder as a `transformers` architecture.

    import qkflow.hf                                                   # registers the architecture
    model = AutoModelForCausalLM.from_pretrained("path/to/exported")

These classes give `Decoder` the interface of `generate`, `pipeline`, `Trainer` and the Hub. Every cache of
`transformers` works: a coupled key depends on its own token only, so it can be cached.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from qkflow.attention.init import InitScheme, ParamSampler, SupportsInit
from qkflow.errors import InputError, unknown
from qkflow.models import Block, Decoder, ModelConfig, preset
from qkflow.models.config import AttentionConfig

MODEL_FIELDS = frozenset(field.name for field in dataclasses.fields(ModelConfig))
ATTENTION_FIELDS = frozenset(field.name for field in dataclasses.fields(AttentionConfig))


def _config_property(
    field: str, doc: str, default_fn: Callable[[QKFlowConfig], Any] | None = None
) -> property:
    """Return a property that reads and writes `shape[field]`; `default_fn` replaces a None."""

    def read(self: QKFlowConfig) -> Any:
        value = (self.shape or {})[field]
        return default_fn(self) if value is None and default_fn is not None else value

    def write(self: QKFlowConfig, value: Any) -> None:
        self.shape = {**(self.shape or {}), field: value}

    return property(read, write, doc=doc)


class QKFlowConfig(PreTrainedConfig):
    """The fields of `ModelConfig`, as keywords or in `shape`, plus what `transformers` needs.

    QKFlowConfig(vocab_size=2048, n_layers=4, dim=128, n_heads=4, attention={"coupling": "euler"})
    """

    model_type = "qkflow"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    # names of the same fields in `transformers` and PEFT; config.json has them next to `shape`
    aliases: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "head_dim": "head_dim",
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "hidden_dim",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    }

    shape: dict | None = None  # default: the preset `tiny`; set by __post_init__
    max_position_embeddings: int = 2048  # sequence length in training; RoPE accepts longer ones
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.shape, dict | None):
            raise InputError(
                f"shape must map model fields to values, not be {self.shape!r}", code="invalid-model-config"
            )
        model_fields = MODEL_FIELDS if self.shape is None else MODEL_FIELDS - self.aliases.keys()
        fields = {name: kwargs.pop(name) for name in list(kwargs) if name in model_fields}
        explicit = {**(self.shape or {}), **fields}
        self.shape = ModelConfig.from_dict({**(self.shape or preset("tiny").to_dict()), **fields}).to_dict()
        kwargs = {
            name: value for name, value in kwargs.items() if not self._is_redundant(name, value, explicit)
        }
        if self.shape["slow"] is not None:  # a transformers cache cannot hold the state of a slow path
            self.use_cache = False
        super().__post_init__(**kwargs)
        self.model_config()  # raises for invalid values that aliases have set

    def _is_redundant(self, name: str, value: Any, explicit: dict[str, Any]) -> bool:
        """Return whether `name` is an alias of an explicit field; raise if the two conflict."""
        if name in ATTENTION_FIELDS:
            raise InputError(
                f"'{name}' is an option of attention: pass attention={{'{name}': {value!r}}}",
                code="attention-option",
            )
        field = self.aliases.get(name)
        if field in explicit and getattr(self, name) != value:
            raise InputError(
                f"{field}={explicit[field]!r} and {name}={value!r} conflict: set one of them",
                code="conflicting-config",
            )
        similar = difflib.get_close_matches(name, MODEL_FIELDS, cutoff=0.8)
        if similar and field is None and not hasattr(self, name):
            raise unknown("field of QKFlowConfig", name, MODEL_FIELDS)
        return field in explicit

    vocab_size = _config_property("vocab_size", "see ModelConfig.vocab_size")
    hidden_size = _config_property("dim", "see ModelConfig.dim")
    num_hidden_layers = _config_property("n_layers", "see ModelConfig.n_layers")
    num_attention_heads = _config_property("n_heads", "query heads")
    num_key_value_heads = _config_property(
        "n_kv_heads", "key and value heads", lambda self: self.num_attention_heads
    )
    head_dim = _config_property(
        "head_dim", "width of a head", lambda self: self.hidden_size // self.num_attention_heads
    )
    intermediate_size = _config_property(
        "hidden_dim", "hidden width of the feed-forward", lambda self: 4 * self.hidden_size
    )
    rms_norm_eps = _config_property("norm_eps", "see ModelConfig.norm_eps")
    tie_word_embeddings = _config_property("tie_embeddings", "see ModelConfig.tie_embeddings")

    def to_dict(self) -> dict[str, Any]:
        """Return the config together with the field names that `transformers` tools read."""
        return {
            **super().to_dict(),
            **{name: getattr(self, name) for name in self.aliases},
        }

    def model_config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.shape or {})


for _field in MODEL_FIELDS - set(vars(QKFlowConfig)):  # from_pretrained(folder, n_layers=2) sets attributes
    setattr(QKFlowConfig, _field, _config_property(_field, f"see ModelConfig.{_field}"))


class LayerCache:
    """One layer of a `transformers` cache with the interface of `KVCache`."""

    def __init__(self, cache: Cache, layer_idx: int) -> None:
        self.cache, self.layer_idx = cache, layer_idx

    @property
    def length(self) -> int:
        return int(self.cache.get_seq_length(self.layer_idx))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end, key_heads = self.length + k.shape[1], k.shape[2]
        if key_heads > v.shape[2]:  # differential: a static cache needs as many key heads as value heads
            k = k.reshape(*k.shape[:2], v.shape[2], -1)
        keys, values = self.cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
        # a static cache returns its whole buffer
        keys, values = keys[:, :, :end].transpose(1, 2), values[:, :, :end].transpose(1, 2)
        return keys.reshape(*keys.shape[:2], key_heads, -1), values


class QKFlowPreTrainedModel(PreTrainedModel):
    config_class = QKFlowConfig
    config: QKFlowConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": OutputRecorder(Block, layer_name="decoder.blocks")  # not the slow path's
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the parameters that a checkpoint did not contain; a new decoder initializes itself."""
        if not isinstance(module, SupportsInit):
            super()._init_weights(module)
            return
        loaded = [
            (parameter, parameter.clone())
            for parameter in module.parameters()
            if getattr(parameter, "_is_hf_initialized", False)
        ]
        config = self.config.model_config()
        seed = int(torch.randint(2**62, ()))
        module.init_parameters(ParamSampler(InitScheme.parse(config.init), seed, config.n_layers))
        for parameter, value in loaded:
            parameter.copy_(value)


class QKFlowModel(QKFlowPreTrainedModel):
    """Token ids (B, T) -> hidden states (B, T, dim)."""

    def __init__(self, config: QKFlowConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.model_config())
        if not next(self.decoder.parameters()).is_meta:
            for module in self.decoder.modules():
                module._is_hf_initialized = True  # type: ignore[assignment]
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        return self.decoder.activation_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.decoder.activation_checkpointing = value

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.decoder.embedding = value
        self.decoder.config = dataclasses.replace(self.decoder.config, vocab_size=len(value.weight))

    def sync_config(self) -> None:
        self.config.shape = self.decoder.config.to_dict()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError(
                "pass either input_ids or inputs_embeds, not both or none", code="invalid-inputs"
            )
        x = self.decoder.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if attention_mask is not None:
            _check_mask(attention_mask, x)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.decoder.slow is not None and (use_cache or past_key_values is not None):
            raise InputError(
                "a transformers cache cannot hold the state of a slow path: pass use_cache=False, or decode "
                "with qkflow.models.generate",
                code="slow-path-cache",
            )
        if self.training and self.gradient_checkpointing:
            use_cache = False
        document_ids = None
        if attention_mask is None and past_key_values is None and position_ids is not None:
            document_ids = _document_ids(position_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        caches: Any = None
        if past_key_values is not None:
            caches = [LayerCache(past_key_values, layer) for layer in range(self.config.num_hidden_layers)]
        mask = None
        if attention_mask is not None and (torch.compiler.is_compiling() or not attention_mask.all()):
            mask = attention_mask.bool()
        hidden = self.decoder.forward_embeddings(
            x, positions=position_ids, attention_mask=mask, document_ids=document_ids, caches=caches
        )
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


def _check_mask(attention_mask: Tensor, x: Tensor) -> None:
    if attention_mask.dim() != 2:
        raise InputError(
            "attention_mask must be (batch, tokens), 1 at real tokens and 0 at padding, not "
            f"{tuple(attention_mask.shape)}",
            code="invalid-attention-mask",
        )
    if attention_mask.shape[0] != x.shape[0]:
        raise InputError(
            f"attention_mask has {attention_mask.shape[0]} rows, but the batch {x.shape[0]}",
            code="invalid-attention-mask",
        )
    if attention_mask.shape[1] < x.shape[1]:
        raise InputError(
            f"attention_mask covers {attention_mask.shape[1]} of {x.shape[1]} tokens",
            code="invalid-attention-mask",
        )


def _document_ids(position_ids: Tensor) -> Tensor | None:
    """Return the document number of every token of packed rows, or None for one document per row.

    As in `transformers`, a document starts wherever a position is not its predecessor plus one.
    """
    first = position_ids[..., :1] - 1
    document_ids = (position_ids.diff(prepend=first, dim=-1) != 1).cumsum(-1)
    return document_ids if torch.compiler.is_compiling() or document_ids.any() else None


class QKFlowForCausalLM(QKFlowPreTrainedModel, GenerationMixin):
    """Token ids (B, T) -> logits of the next token (B, T, vocab_size)."""

    def __init__(self, config: QKFlowConfig) -> None:
        super().__init__(config)
        if not config.model_config().causal:
            raise InputError(
                "a causal language model needs causal=True: use QKFlowModel for an encoder",
                code="model-not-causal",
            )
        self.model = QKFlowModel(config)
        self.post_init()
        if self.model.decoder.slow is not None and self.generation_config is not None:
            self.generation_config.use_cache = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.decoder.slow is not None:  # recomputes the whole sequence for every token
            kwargs |= {"use_cache": False, "cache_implementation": None}
        return super().generate(*args, **kwargs)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        return attention_mask  # the decoder builds the causal mask itself

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.decoder.head  # None with tied embeddings

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.model.decoder.head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.model.decoder.logits(slice_logits_to_keep(out.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )


class QKFlowForSequenceClassification(GenericForSequenceClassification, QKFlowPreTrainedModel):
    """Classification from the last token that is not padding."""

    roles: ClassVar[dict[str, str]] = {"score": "head"}


AutoConfig.register("qkflow", QKFlowConfig, exist_ok=True)
AutoModel.register(QKFlowConfig, QKFlowModel, exist_ok=True)
AutoModelForCausalLM.register(QKFlowConfig, QKFlowForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(QKFlowConfig, QKFlowForSequenceClassification, exist_ok=True)
