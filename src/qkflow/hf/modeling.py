"""Our decoder as an architecture of `transformers`.

    import qkflow.hf                                                   # registers the architecture
    model = AutoModelForCausalLM.from_pretrained("path/to/exported")

These classes give `Decoder` the interface that `generate`, `pipeline`, `Trainer` and the hub expect. Any
cache of `transformers` works, since a coupled key never changes and can be kept.
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
    """A field of our config, here by whatever name; `otherwise` says what a None stands for."""

    def read(self: QKFlowConfig) -> Any:
        value = (self.shape or {})[field]
        return default_fn(self) if value is None and default_fn is not None else value

    def write(self: QKFlowConfig, value: Any) -> None:
        self.shape = {**(self.shape or {}), field: value}

    return property(read, write, doc=doc)


class QKFlowConfig(PreTrainedConfig):
    """The fields of `ModelConfig`, given directly or as `shape`, and what `transformers` needs besides.

    QKFlowConfig(vocab_size=2048, n_layers=4, dim=128, n_heads=4, attention={"coupling": "euler"})
    """

    model_type = "qkflow"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    # what `transformers`, PEFT and others call the fields of ours
    aliases: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "hidden_dim",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    }

    shape: dict | None = None  # a preset, unless given; never None once made
    max_position_embeddings: int = 2048  # what the model was trained on; rotary positions go further
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in MODEL_FIELDS}
        if not isinstance(self.shape, dict | None):
            raise InputError(f"shape is a mapping of model fields to values, not {self.shape!r}")
        said = {**(self.shape or {}), **given}
        self.shape = ModelConfig.from_dict({**(self.shape or preset("tiny").to_dict()), **given}).to_dict()
        kwargs = {name: value for name, value in kwargs.items() if not self._already_given(name, value, said)}
        if self.shape["slow"] is not None:  # its state has no place in a cache of transformers
            self.use_cache = False
        super().__post_init__(**kwargs)
        self.model_config()  # refuses what came by another name

    def _already_given(self, name: str, value: Any, given: dict[str, Any]) -> bool:
        """Whether the shape says this already; what contradicts it, or would be passed over, is refused."""
        if name in ATTENTION_FIELDS:
            raise InputError(f"'{name}' is an option of attention: give attention={{'{name}': {value!r}}}")
        field = self.aliases.get(name)
        if field in given and getattr(self, name) != value:
            raise InputError(f"{field}={given[field]!r} and {name}={value!r} contradict each other")
        meant = difflib.get_close_matches(name, MODEL_FIELDS, cutoff=0.8)
        if meant and field is None and not hasattr(self, name):
            raise unknown("field of QKFlowConfig", name, MODEL_FIELDS)
        return field in given

    vocab_size = _config_property("vocab_size", "size of the vocabulary")
    hidden_size = _config_property("dim", "size of the residual stream")
    num_hidden_layers = _config_property("n_layers", "number of blocks")
    num_attention_heads = _config_property("n_heads", "query heads")
    num_key_value_heads = _config_property(
        "n_kv_heads", "key and value heads", lambda self: self.num_attention_heads
    )
    head_dim = _config_property(
        "head_dim", "size of a head", lambda self: self.hidden_size // self.num_attention_heads
    )
    intermediate_size = _config_property(
        "hidden_dim", "width of the feed-forward", lambda self: 4 * self.hidden_size
    )
    rms_norm_eps = _config_property("norm_eps", "added under the root of every norm")
    tie_word_embeddings = _config_property(
        "tie_embeddings", "whether the embedding is the output matrix as well"
    )

    def to_dict(self) -> dict[str, Any]:
        """With the names that others look for in a config's file."""
        return {
            **super().to_dict(),
            **{name: getattr(self, name) for name in ("vocab_size", "head_dim", *self.aliases)},
        }

    def model_config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.shape or {})


for _field in MODEL_FIELDS - set(vars(QKFlowConfig)):  # so that from_pretrained(folder, n_layers=2) finds it
    setattr(QKFlowConfig, _field, _config_property(_field, f"see ModelConfig.{_field}"))


class LayerCache:
    """One layer of a `transformers` cache, in the manner of our own `KVCache`."""

    def __init__(self, cache: Cache, layer_idx: int) -> None:
        self.cache, self.layer_idx = cache, layer_idx

    @property
    def length(self) -> int:
        return int(self.cache.get_seq_length(self.layer_idx))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end, key_heads = self.length + k.shape[1], k.shape[2]
        if key_heads > v.shape[2]:  # differential: a static cache wants as many heads of keys as of values
            k = k.reshape(*k.shape[:2], v.shape[2], -1)
        keys, values = self.cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
        # a static cache hands out all its room, filled or not
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
        """Start what a checkpoint did not hold; a fresh decoder has started itself."""
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
    """Token ids in, hidden states out."""

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
            raise InputError("a qkflow model reads either input_ids or inputs_embeds")
        x = self.decoder.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if attention_mask is not None:
            _check_mask(attention_mask, x)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.decoder.slow is not None and (use_cache or past_key_values is not None):
            raise InputError(
                "a slow path keeps what no cache of transformers has a place for: pass use_cache=False, or "
                "decode with qkflow.models.generate"
            )
        if self.training and self.gradient_checkpointing:
            use_cache = False
        documents = None
        if attention_mask is None and past_key_values is None and position_ids is not None:
            documents = _document_ids(position_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        caches: Any = None
        if past_key_values is not None:
            caches = [LayerCache(past_key_values, layer) for layer in range(self.config.num_hidden_layers)]
        padding = None
        if attention_mask is not None and (torch.compiler.is_compiling() or not attention_mask.all()):
            padding = attention_mask.bool()
        hidden = self.decoder.forward_embeddings(
            x, positions=position_ids, attention_mask=padding, document_ids=documents, caches=caches
        )
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


def _check_mask(attention_mask: Tensor, x: Tensor) -> None:
    if attention_mask.dim() != 2:
        raise InputError("attention_mask must be (batch, tokens), 1 at real tokens and 0 at padding")
    if attention_mask.shape[0] != x.shape[0]:
        raise InputError(f"attention_mask is for {attention_mask.shape[0]} sequences, not {x.shape[0]}")
    if attention_mask.shape[1] < x.shape[1]:
        raise InputError(f"attention_mask covers {attention_mask.shape[1]} tokens of {x.shape[1]}")


def _document_ids(position_ids: Tensor) -> Tensor | None:
    """Which text of a packed row each token belongs to, as `transformers` reads it: positions begin anew."""
    first = position_ids[..., :1] - 1
    documents = (position_ids.diff(prepend=first, dim=-1) != 1).cumsum(-1)
    return documents if torch.compiler.is_compiling() or documents.any() else None


class QKFlowForCausalLM(QKFlowPreTrainedModel, GenerationMixin):
    """Token ids in, logits of the next token out."""

    def __init__(self, config: QKFlowConfig) -> None:
        super().__init__(config)
        self.model = QKFlowModel(config)
        self.post_init()
        if self.model.decoder.slow is not None and self.generation_config is not None:
            self.generation_config.use_cache = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.decoder.slow is not None:  # reads everything again for every token
            kwargs |= {"use_cache": False, "cache_implementation": None}
        return super().generate(*args, **kwargs)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        return attention_mask  # our attention makes its own mask of who sees whom

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.decoder.head  # None where it is the embedding

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
    """Reads the class at the last token that is not padding."""

    roles: ClassVar[dict[str, str]] = {"score": "head"}


AutoConfig.register("qkflow", QKFlowConfig, exist_ok=True)
AutoModel.register(QKFlowConfig, QKFlowModel, exist_ok=True)
AutoModelForCausalLM.register(QKFlowConfig, QKFlowForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(QKFlowConfig, QKFlowForSequenceClassification, exist_ok=True)
