"""Start a fresh model of any family again, with one of our starts.

The starts are those of `qkflow.attention.init`, taken from the very modules that define them: each layer's
queries, keys, values and outputs are drawn as a circuit of ours and written into the model's own weights.
Norms keep the start their family gives them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkflow.attention.init import InitScheme, ParamSampler, copy_into
from qkflow.attention.projections import FactorizedOV, FactorizedQK
from qkflow.errors import InputError
from qkflow.hf.attention_layers import (
    AttentionLayer,
    check_weight_writable,
    find_attention_layers,
    linear_weight,
)
from qkflow.hf.parameter_roles import RoleOverrides, infer_parameter_roles

# the second half of a feed-forward, by the names it goes by
RESIDUAL_PROJECTION_PATTERN = re.compile(
    r"(^|\.)(down_proj|c_proj|fc2|fc_out|dense_4h_to_h|lin2|linear2|w2|wo|ffn_output|output\.dense|Wo)\b"
)


@dataclass(frozen=True)
class ParameterChange:
    """A parameter that was started again, and its standard deviation before and after."""

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
    """Start every matrix and bias of a fresh `transformers` model again, in place; what changed.

        model = AutoModelForCausalLM.from_config(config)
        restart(model, "symmetric=1", seed=0)

    start    `gpt2`, `fan_in`, `symmetric=c` (on `fan_in`; `gpt2+symmetric=c` on the other), `mimetic`
    seed     repeats a start exactly
    roles    what parameters of unknown names are, e.g. {"*.sinks": "scoring"}, as in `hf.param_groups`

    Whatever the model has learned is lost: this is for models that have not been trained.
    """
    parsed = InitScheme.parse(init)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("the model is on the meta device, with no weights to start: give it memory first")
    sites, known = find_attention_layers(model), infer_parameter_roles(model, roles)
    layers = [
        (site, *_value_and_output_projections(model, site, known)) for site in sites
    ]  # all checked before any is changed
    parameters = dict(model.named_parameters())
    before = {name: _std(parameter) for name, parameter in parameters.items()}
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    for name, parameter in parameters.items():
        if known[name] in ("norm", "qk_norm", "coupling"):
            continue
        if name.endswith("bias"):  # of experts, they come as one matrix
            parameter.zero_()
        elif known[name] in ("mlp", "embed", "head") and parameter.dim() > 1:
            _reinit_matrix(model, name, parameter, ParamSampler(parsed, seed, len(sites), name))
    for site, v, o in layers:
        _reinit_attention(site, v, o, ParamSampler(parsed, seed, len(sites), site.name))
    after = {name: _std(parameter) for name, parameter in parameters.items()}
    return [
        ParameterChange(name, known[name], before[name], after[name])
        for name in parameters
        if before[name] != after[name]
    ]


def _value_and_output_projections(
    model: nn.Module, attn_layer: AttentionLayer, roles: dict[str, str]
) -> tuple[nn.Module, nn.Module]:
    """A layer's value and output projections, once all four are known to be ordinary matrices."""
    o = _find_output_projection(model, attn_layer, roles)
    if attn_layer.v_name is None or o is None:
        raise InputError(f"'{attn_layer.name}' has no value or output projection that could be found")
    for part in dict.fromkeys((attn_layer.q_name, attn_layer.k_name, attn_layer.v_name)):
        check_weight_writable(attn_layer.module.get_submodule(part), f"{attn_layer.name}.{part}")
    check_weight_writable(o, f"{attn_layer.name} (output)")
    return attn_layer.module.get_submodule(attn_layer.v_name), o


def _find_output_projection(
    model: nn.Module, attn_layer: AttentionLayer, roles: dict[str, str]
) -> nn.Module | None:
    for prefix in (attn_layer.name, attn_layer.name.rpartition(".")[0]):  # BERT keeps it beside the attention
        for name, role in roles.items():
            if role == "o" and name.startswith(f"{prefix}.") and name.endswith(".weight"):
                return model.get_submodule(name.removesuffix(".weight"))
    return None


def _reinit_attention(attn_layer: AttentionLayer, v: nn.Module, o: nn.Module, sampler: ParamSampler) -> None:
    """Draw this layer's circuits as ours, and write them into its weights."""
    module = attn_layer.module
    q, k = module.get_submodule(attn_layer.q_name), module.get_submodule(attn_layer.k_name)
    width = linear_weight(q).shape[1]
    qk, ov = (
        FactorizedQK(width, attn_layer.heads, bias=False),
        FactorizedOV(width, attn_layer.heads, bias=False),
    )
    qk.init_parameters(sampler)
    ov.init_parameters(sampler)
    for part, projection, drawn in (("q", q, qk.q), ("k", k, qk.k), ("v", v, ov.v)):
        weight = linear_weight(projection)
        weight[attn_layer.rows(part)] = drawn.weight.to(weight)
    copy_into(linear_weight(o), ov.o.weight.to(o.weight.device))  # type: ignore[arg-type]


def _reinit_matrix(model: nn.Module, name: str, parameter: Tensor, sampler: ParamSampler) -> None:
    owner = model.get_submodule(name.rpartition(".")[0])
    residual = RESIDUAL_PROJECTION_PATTERN.search(name) is not None
    fan_in = _fan_in(owner, parameter, residual)
    copy_into(
        parameter, sampler.matrix("weight", parameter.shape, fan_in, residual=residual).to(parameter.device)
    )
    if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
        parameter[owner.padding_idx] = 0


def _fan_in(owner: nn.Module, parameter: Tensor, residual: bool) -> int:
    if isinstance(owner, nn.Embedding):
        return owner.embedding_dim  # tied, it is the output matrix, whose fan-in is the width
    if hasattr(owner, "nf"):
        return linear_weight(owner).shape[1]
    if hasattr(owner, "kernel_size"):  # a convolution
        return parameter[0].numel()
    # one for each expert, of which some families keep the transpose: the width is the input of a first half
    # and the output of a second
    outputs, inputs = parameter.shape[-2:]
    width = getattr(owner, "hidden_dim", getattr(owner, "hidden_size", None))
    transposed = parameter.dim() > 2 and width == (inputs if residual else outputs)
    return outputs if transposed else inputs


def _std(parameter: Tensor) -> float:
    return float(parameter.detach().double().std(correction=0))
