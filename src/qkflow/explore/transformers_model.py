"""A `transformers` model in the explorer, with or without attached couplings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.attention.couplings.base import Coupling
from qkflow.data.tokenizer import backend_errors
from qkflow.errors import InputError
from qkflow.explore.base import ExplorableModel, Trajectory
from qkflow.explore.capture import Capture, ForwardPass
from qkflow.explore.classifier import TransformersClassifier
from qkflow.explore.decoder_model import integrate_steps, lens_names
from qkflow.hf.attention_layers import AttentionLayer, find_attention_layers
from qkflow.hf.coupled_layer import CoupledAttention, active_coupling
from qkflow.hf.qkv_layout import OUTPUT_PROJECTIONS
from qkflow.measures.attribution import Classifier


class TransformersModel(ExplorableModel):
    """A model of `transformers` with eager attention, which returns its weights.

    head    `causal`: next-token logits; `masked`: token logits, no lens; `classes`: a classifier
    """

    kind = "transformers"

    def __init__(self, name: str, model: Any, tokenizer: Any, head: str) -> None:
        self.name, self.model, self.tokenizer, self.head = name, model.eval(), tokenizer, head
        model.set_attn_implementation("eager")  # the fused kernels do not return weights
        self.layers: list[AttentionLayer] = find_attention_layers(model)
        self.n_heads = [layer.heads.n_q for layer in self.layers]
        self.vocab_size = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
        self.position_limit = getattr(model.config, "max_position_embeddings", None)
        self.predicts_tokens = head == "causal"
        self.device = model.get_input_embeddings().weight.device
        self.special_label = "[special]"
        if head == "classes":
            names = model.config.id2label
            self.class_names = [str(names[index]) for index in range(model.config.num_labels)]
        self.final_norm = self._find_final_norm() if head == "causal" else None
        self.encode("a")  # raises now if the tokenizer is not the model's

    @backend_errors()
    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        n_embeddings = self.model.get_input_embeddings().weight.shape[0]
        if max(ids, default=0) >= n_embeddings:
            raise InputError(
                f"the tokenizer of {self.name} gives token {max(ids)}, its model has {n_embeddings} "
                "embeddings: give the tokenizer it was trained with",
                code="vocab-size-mismatch",
            )
        return ids

    @backend_errors()
    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def special_tokens(self, ids: list[int]) -> list[bool]:
        return [token in self.tokenizer.all_special_ids for token in ids]

    def forward(self, ids: Tensor, off: frozenset[tuple[int, int]]) -> ForwardPass:
        with ExitStack() as stack:
            for layer, head in off:
                stack.enter_context(zero_head(self.layers[layer], head))
            out = self._run(ids)
        if not out.attentions or len(out.attentions) != self.n_layers:
            raise InputError(
                f"{type(self.model).__name__} does not return the attention weights of its "
                f"{self.n_layers} layers",
                code="no-attention-weights",
            )
        return ForwardPass(
            weights=(weights[0] for weights in out.attentions),
            hidden=[state[0] for state in out.hidden_states],
            final=out.hidden_states[-1][0],
            logits=out.logits[0] if self.head == "classes" else None,
        )

    def _run(self, ids: Tensor) -> Any:
        keep = {"logits_to_keep": 1} if self.head == "causal" else {}
        try:
            return self.model(
                input_ids=ids[None],
                attention_mask=torch.ones_like(ids)[None],
                output_attentions=True,
                output_hidden_states=True,
                **keep,
            )
        except Exception as error:  # transformers does not check every value of a config
            if "memory" in str(error) or isinstance(error, MemoryError):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"{self.name} cannot be run ({reason}): give its config.json as save_pretrained wrote it",
                code="model-not-loadable",
            ) from error

    def output_logits(self, final: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(final)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def lens_logits(self, capture: Capture, position: int) -> list[tuple[str, Tensor]]:
        if self.head != "causal":
            return []
        states = [layer[position] for layer in capture.hidden]
        if self.final_norm is None:
            return [(lens_names(len(states))[-1], self.output_logits(states[-1]))]
        normed = [*map(self.final_norm, states[:-1]), states[-1]]  # the last state is normed already
        return list(zip(lens_names(len(states)), self.output_logits(torch.stack(normed)), strict=True))

    @torch.no_grad()
    def _find_final_norm(self) -> nn.Module | None:
        """Return the norm whose output is the last hidden state: they share memory."""
        outputs: dict[nn.Module, Tensor] = {}
        hooks = [
            module.register_forward_hook(lambda norm, arguments, out: outputs.__setitem__(norm, out))
            for module in self.model.modules()
            if "norm" in type(module).__name__.lower()
        ]
        try:
            last = self._run(torch.tensor([1, 0, 1], device=self.device)).hidden_states[-1]
        finally:
            for hook in hooks:
                hook.remove()
        return next((norm for norm, out in outputs.items() if out.data_ptr() == last.data_ptr()), None)

    def coupling(self, layer: int) -> Coupling | None:
        module = self.layers[layer].module
        coupling = active_coupling(module) if isinstance(module, CoupledAttention) else None
        return coupling if isinstance(coupling, Coupling) else None

    @torch.no_grad()
    def trajectory(self, capture: Capture, layer: int, head: int) -> Trajectory:
        if capture.projections is None:
            capture.projections = self._read_projections(capture)
        q, k = capture.projections[layer]
        return integrate_steps(self.coupling(layer), q, k, head, head // self.layers[layer].heads.group_size)

    def _read_projections(self, capture: Capture) -> list[tuple[Tensor, Tensor]]:
        """Run the model again, and return q (1, T, H, D) and k (1, T, G, D) of every layer."""
        outputs: list[dict[str, Tensor]] = [{} for _ in self.layers]
        with ExitStack() as stack:
            for layer, head in capture.off:
                stack.enter_context(zero_head(self.layers[layer], head))
            for attention, kept in zip(self.layers, outputs, strict=True):
                for name in {attention.q_name, attention.k_name}:
                    projection = attention.module.get_submodule(name)
                    stack.enter_context(_keep_output(projection, name, kept))
            self._run(torch.tensor(capture.ids, device=self.device))
        return [split_heads(layer, kept) for layer, kept in zip(self.layers, outputs, strict=True)]

    def classifier(self) -> Classifier:
        if self.head != "classes":
            return super().classifier()
        return TransformersClassifier(self.model, lambda ids: list(self._run(ids).attentions))


def split_heads(layer: AttentionLayer, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return q (1, T, H, D) and k (1, T, G, D) from the outputs of the projections."""
    if layer.layout is not None:
        q, k, _ = layer.layout.split(outputs[layer.q_name])
        return q, k
    heads = layer.heads
    q = outputs[layer.q_name].unflatten(-1, (heads.n_q, heads.head_dim))
    return q, outputs[layer.k_name].unflatten(-1, (heads.n_k, heads.head_dim))


@contextmanager
def _keep_output(module: nn.Module, name: str, outputs: dict[str, Tensor]) -> Iterator[None]:
    hook = module.register_forward_hook(lambda projection, arguments, out: outputs.__setitem__(name, out))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def zero_head(layer: AttentionLayer, head: int) -> Iterator[None]:
    """Set the output of one head to zero, before the output projection.

    Modules such as BERT's leave the output projection to their parent: then their own output is changed.
    """
    columns = slice(head * layer.heads.v_head_dim, (head + 1) * layer.heads.v_head_dim)

    def zeroed(context: Tensor) -> Tensor:
        context = context.clone()
        context[..., columns] = 0
        return context

    width = layer.heads.n_q * layer.heads.v_head_dim
    projections = [getattr(layer.module, name, None) for name in OUTPUT_PROJECTIONS]
    output = next((module for module in projections if _reads(module, width)), None)
    if output is not None:
        hook = output.register_forward_pre_hook(lambda module, inputs: (zeroed(inputs[0]), *inputs[1:]))
    else:
        hook = layer.module.register_forward_hook(
            lambda module, inputs, out: (zeroed(out[0]), *out[1:]) if isinstance(out, tuple) else zeroed(out)
        )
    try:
        yield
    finally:
        hook.remove()


def _reads(module: nn.Module | None, width: int) -> bool:
    """Return whether a module is a projection of `width` inputs: Linear, or GPT-2's transposed Conv1D."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2:
        return False
    return bool(weight.shape[0 if type(module).__name__ == "Conv1D" else 1] == width)
