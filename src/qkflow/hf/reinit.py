"""Reinitialize a fresh model of any family with an init scheme of `qkflow.attention.init`.

Each layer's query, key, value and output matrices are drawn by qkflow's own circuits and copied into the
weights of the model, so a scheme means the same in both. Norms keep their init.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkflow.attention.init import InitScheme, ParamSampler, Part, copy_into
from qkflow.attention.projections import FactorizedOV, FactorizedQK
from qkflow.errors import InputError
from qkflow.hf.attention_layers import (
    AttentionLayer,
    check_no_cross_attention,
    check_weight_writable,
    find_attention_layers,
    linear_weight,
)
from qkflow.hf.coupled_layer import CoupledAttention
from qkflow.hf.parameter_roles import RoleOverrides, infer_parameter_roles

# matrices that write to the residual stream (the second half of a feed-forward)
RESIDUAL_PROJECTION_PATTERN = re.compile(
    r"(^|\.)(down_proj|c_proj|fc2|fc_out|dense_4h_to_h|lin2|linear2|w2|wo|ffn_output|output\.dense|Wo)\b"
)


@dataclass(frozen=True)
class ParameterChange:
    """A reinitialized parameter and its standard deviation before and after."""

    name: str
    role: str
    std_before: float
    std_after: float


@torch.no_grad()
def reinitialize(
    model: nn.Module,
    init: str | InitScheme = "gpt2",
    *,
    seed: int | None = None,
    roles: RoleOverrides | None = None,
) -> list[ParameterChange]:
    """Reinitialize every matrix and bias of a `transformers` model, in place; return what changed.

        model = AutoModelForCausalLM.from_config(config)
        hf.reinitialize(model, "symmetric=1", seed=0)

    init     any init of `qkflow inits`: `gpt2`, `modern`, `symmetric=c`, `fan_in{out=zero}+tied_qk`, …
    seed     makes the init reproducible
    roles    roles of parameters with unknown names, e.g. {"*.sinks": "scoring"}, as in `hf.param_groups`

    Trained weights are lost: use it on untrained models.
    """
    scheme = InitScheme.parse(init)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            "cannot reinitialize a model on the meta device: call model.to_empty(device=…) first",
            code="no-weights",
        )
    attn_layers = find_attention_layers(model)
    check_no_cross_attention(model, "reinitialize a part of the model without it, e.g. model.get_encoder()")
    known = infer_parameter_roles(model, roles)
    head_name = _output_matrix_name(model)
    # check all layers before changing any
    circuits = [(layer, *_value_and_output_projections(model, layer, known)) for layer in attn_layers]
    parameters = dict(model.named_parameters())
    before = {name: _std(parameter) for name, parameter in parameters.items()}
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    n_layers = len(attn_layers)
    for name, parameter in parameters.items():
        if known[name] in ("norm", "qk_norm", "coupling"):
            continue
        if name.endswith("bias"):  # biases of experts are matrices
            parameter.zero_()
        elif known[name] in ("mlp", "embed", "head") and parameter.dim() > 1:
            part = _part(name, known[name], head_name)
            _reinit_matrix(model, name, parameter, part, ParamSampler(scheme, seed, n_layers, name))
    for layer, v, o in circuits:
        if isinstance(layer.module, CoupledAttention):
            layer.module.release_prepared()
        _reinit_attention(layer, v, o, ParamSampler(scheme, seed, n_layers, layer.name))
    after = {name: _std(parameter) for name, parameter in parameters.items()}
    return [
        ParameterChange(name, known[name], before[name], after[name])
        for name in parameters
        if before[name] != after[name]
    ]


def _value_and_output_projections(
    model: nn.Module, attn_layer: AttentionLayer, roles: dict[str, str]
) -> tuple[nn.Module, nn.Module]:
    """Return a layer's value and output projections, after checking that all four weights are writable."""
    o = _find_output_projection(model, attn_layer, roles)
    if attn_layer.v_name is None or o is None:
        raise InputError(
            f"'{attn_layer.name}' has no known value or output projection: pass roles={{pattern: 'o'}}",
            code="unsupported-attention",
        )
    for part in dict.fromkeys((attn_layer.q_name, attn_layer.k_name, attn_layer.v_name)):
        check_weight_writable(attn_layer.module.get_submodule(part), f"{attn_layer.name}.{part}")
    check_weight_writable(o, f"{attn_layer.name} (output)")
    return attn_layer.module.get_submodule(attn_layer.v_name), o


def _find_output_projection(
    model: nn.Module, attn_layer: AttentionLayer, roles: dict[str, str]
) -> nn.Module | None:
    for prefix in (attn_layer.name, attn_layer.name.rpartition(".")[0]):  # BERT: in the parent module
        for name, role in roles.items():
            if role == "o" and name.startswith(f"{prefix}.") and name.endswith(".weight"):
                return model.get_submodule(name.removesuffix(".weight"))
    return None


def _reinit_attention(attn_layer: AttentionLayer, v: nn.Module, o: nn.Module, sampler: ParamSampler) -> None:
    """Draw the QK and OV circuits of a layer and copy them into its weights."""
    dim = linear_weight(attn_layer.q).shape[1]
    qk = FactorizedQK(dim, attn_layer.heads, bias=False)
    ov = FactorizedOV(dim, attn_layer.heads, bias=False)
    qk.init_parameters(sampler)
    ov.init_parameters(sampler)
    for part, projection, drawn in (("q", attn_layer.q, qk.q), ("k", attn_layer.k, qk.k), ("v", v, ov.v)):
        weight = linear_weight(projection)
        weight[attn_layer.rows(part)] = drawn.weight.to(weight)
    copy_into(linear_weight(o), ov.o.weight.to(o.weight.device))  # type: ignore[arg-type]


def _output_matrix_name(model: nn.Module) -> str | None:
    """Return the name of the output matrix of a language model; a tied one has the embedding's name."""
    get_output = getattr(model, "get_output_embeddings", lambda: None)
    weight = getattr(get_output(), "weight", None)
    return next((name for name, parameter in model.named_parameters() if parameter is weight), None)


def _part(name: str, role: str, head_name: str | None) -> Part | None:
    """Return what a mixed init calls this matrix; None for a classifier, a pooler and the like."""
    if role == "mlp":
        return "out" if RESIDUAL_PROJECTION_PATTERN.search(name) else "mlp"
    if role == "embed":
        return "embed"
    return "head" if name == head_name else None


def _reinit_matrix(
    model: nn.Module, name: str, parameter: Tensor, part: Part | None, sampler: ParamSampler
) -> None:
    owner = model.get_submodule(name.rpartition(".")[0])
    fan_in = _fan_in(owner, parameter, part == "out")
    copy_into(parameter, sampler.matrix("weight", parameter.shape, fan_in, part=part).to(parameter.device))
    if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
        parameter[owner.padding_idx] = 0


def _fan_in(owner: nn.Module, parameter: Tensor, residual: bool) -> int:
    if isinstance(owner, nn.Embedding):
        return owner.embedding_dim  # fan-in of the tied output matrix
    if hasattr(owner, "nf"):
        return linear_weight(owner).shape[1]
    if hasattr(owner, "kernel_size"):  # a convolution
        return parameter[0].numel()
    # Expert weights (E, out, in); some families store (E, in, out). The model dimension tells them apart: it
    # is the input of a first matrix and the output of a residual one.
    outputs, inputs = parameter.shape[-2:]
    dim = getattr(owner, "hidden_dim", getattr(owner, "hidden_size", None))
    transposed = parameter.dim() > 2 and dim == (inputs if residual else outputs)
    return outputs if transposed else inputs


def _std(parameter: Tensor) -> float:
    return float(parameter.detach().double().std(correction=0))
