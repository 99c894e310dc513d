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

from qkflow.attention.init import Draw, Start, fill
from qkflow.attention.projections import FactorisedOV, FactorisedQK
from qkflow.errors import InputError
from qkflow.hf.attention_layers import Site, outputs_first, refuse_fixed_weights, self_attentions
from qkflow.hf.parameter_roles import Roles, roles_of

# the second half of a feed-forward, by the names it goes by
RESIDUAL = re.compile(
    r"(^|\.)(down_proj|c_proj|fc2|fc_out|dense_4h_to_h|lin2|linear2|w2|wo|ffn_output|output\.dense|Wo)\b"
)


@dataclass(frozen=True)
class Change:
    """A parameter that was started again, and its standard deviation before and after."""

    name: str
    role: str
    before: float
    after: float


@torch.no_grad()
def restart(
    model: nn.Module, start: str | Start = "gpt2", *, seed: int | None = None, roles: Roles | None = None
) -> list[Change]:
    """Start every matrix and bias of a fresh `transformers` model again, in place; what changed.

        model = AutoModelForCausalLM.from_config(config)
        restart(model, "symmetric=1", seed=0)

    start    `gpt2`, `fan_in`, `symmetric=c` (on `fan_in`; `gpt2+symmetric=c` on the other), `mimetic`
    seed     repeats a start exactly
    roles    what parameters of unknown names are, e.g. {"*.sinks": "scoring"}, as in `hf.param_groups`

    Whatever the model has learned is lost: this is for models that have not been trained.
    """
    parsed = Start.parse(start)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("the model is on the meta device, with no weights to start: give it memory first")
    sites, known = self_attentions(model), roles_of(model, roles)
    layers = [
        (site, *_projections(model, site, known)) for site in sites
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
            _restart_matrix(model, name, parameter, Draw(parsed, seed, len(sites), name))
    for site, v, o in layers:
        _restart_attention(site, v, o, Draw(parsed, seed, len(sites), site.name))
    after = {name: _std(parameter) for name, parameter in parameters.items()}
    return [
        Change(name, known[name], before[name], after[name])
        for name in parameters
        if before[name] != after[name]
    ]


def _projections(model: nn.Module, site: Site, roles: dict[str, str]) -> tuple[nn.Module, nn.Module]:
    """A layer's value and output projections, once all four are known to be ordinary matrices."""
    o = _output(model, site, roles)
    if site.v is None or o is None:
        raise InputError(f"'{site.name}' has no value or output projection that could be found")
    for part in dict.fromkeys((site.q, site.k, site.v)):
        refuse_fixed_weights(site.module.get_submodule(part), f"{site.name}.{part}")
    refuse_fixed_weights(o, f"{site.name} (output)")
    return site.module.get_submodule(site.v), o


def _output(model: nn.Module, site: Site, roles: dict[str, str]) -> nn.Module | None:
    for prefix in (site.name, site.name.rpartition(".")[0]):  # BERT keeps it beside the attention
        for name, role in roles.items():
            if role == "o" and name.startswith(f"{prefix}.") and name.endswith(".weight"):
                return model.get_submodule(name.removesuffix(".weight"))
    return None


def _restart_attention(site: Site, v: nn.Module, o: nn.Module, draw: Draw) -> None:
    """Draw this layer's circuits as ours, and write them into its weights."""
    module = site.module
    q, k = module.get_submodule(site.q), module.get_submodule(site.k)
    width = outputs_first(q).shape[1]
    qk, ov = FactorisedQK(width, site.heads, bias=False), FactorisedOV(width, site.heads, bias=False)
    qk.start_parameters(draw)
    ov.start_parameters(draw)
    for part, projection, drawn in (("q", q, qk.q), ("k", k, qk.k), ("v", v, ov.v)):
        weight = outputs_first(projection)
        weight[site.rows(part)] = drawn.weight.to(weight)
    fill(outputs_first(o), ov.o.weight.to(o.weight.device))  # type: ignore[arg-type]


def _restart_matrix(model: nn.Module, name: str, parameter: Tensor, draw: Draw) -> None:
    owner = model.get_submodule(name.rpartition(".")[0])
    residual = RESIDUAL.search(name) is not None
    fan_in = _fan_in(owner, parameter, residual)
    fill(parameter, draw.matrix("weight", parameter.shape, fan_in, residual=residual).to(parameter.device))
    if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
        parameter[owner.padding_idx] = 0


def _fan_in(owner: nn.Module, parameter: Tensor, residual: bool) -> int:
    if isinstance(owner, nn.Embedding):
        return owner.embedding_dim  # tied, it is the output matrix, whose fan-in is the width
    if hasattr(owner, "nf"):
        return outputs_first(owner).shape[1]
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
