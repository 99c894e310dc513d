"""Coupled models with copy, checkpointing, torch.compile, accelerate offloading and torch.func."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from families import disturb, output, tiny, token_ids
from input_errors import raises_code
from qkflow import hf


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_deepcopy_and_pickle(family: str) -> None:
    model = hf.attach(tiny(family), "euler")
    expected = output(model, token_ids())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(other, token_ids()), expected)
        assert len(hf.named_coupled_layers(other)) == 2
        assert all(
            layer.coupling is not own.coupling
            for (_, layer), (_, own) in zip(
                hf.named_coupled_layers(other), hf.named_coupled_layers(model), strict=True
            )
        )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("coupling", ["affine", "drift", "euler", "leapfrog"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing_matches(family: str, coupling: str, reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = hf.attach(tiny(family), coupling, seed=0).train()
        disturb(model)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(input_ids=token_ids(), labels=token_ids(), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if ".coupling." in name})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize(
    ("family", "coupling", "layers"),
    [("llama", "affine", "num_hidden_layers"), ("gpt2", "euler", "n_layer")],
)
def test_compiles_to_one_graph(family: str, coupling: str, layers: str) -> None:
    model = hf.attach(tiny(family, **{layers: 1}), coupling, seed=0)
    disturb(model)
    expected = output(model, token_ids())
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(output(compiled, token_ids()), expected)


@pytest.mark.parametrize("order", ["hooks first", "coupling first"])
def test_accelerate_hooks(order: str) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    calls = []

    class Counting(ModelHook):
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
            calls.append(type(module).__name__)
            return args, kwargs

    expected = output(hf.attach(tiny("llama"), "euler", seed=0), token_ids())
    model = tiny("llama")
    plain = output(model, token_ids())
    if order == "coupling first":
        hf.attach(model, "euler", seed=0)
    for layer in model.model.layers:
        add_hook_to_module(layer.self_attn, Counting())
    if order == "hooks first":
        hf.attach(model, "euler", seed=0)
    assert torch.equal(output(model, token_ids()), expected)
    assert calls == ["CoupledLlamaAttention"] * 2
    hf.detach(model)
    assert torch.equal(output(model, token_ids()), plain)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(output(model, token_ids()), plain)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attach_to_offloaded_model(family: str) -> None:
    from accelerate import cpu_offload

    expected = output(hf.attach(tiny(family), "drift:step=0.7"), token_ids())
    model = tiny(family)
    cpu_offload(model, execution_device="cpu")
    hf.attach(model, "drift:step=0.7")
    torch.testing.assert_close(output(model, token_ids()), expected)
    with raises_code("weights-offloaded"):
        hf.merge(model)


@pytest.mark.parametrize("coupling", ["affine", "euler", "uncoupled"])
def test_offload_coupled_model(coupling: str) -> None:
    from accelerate import cpu_offload

    expected = output(hf.attach(tiny("llama"), coupling, seed=0), token_ids())
    model = hf.attach(tiny("llama"), coupling, seed=0)
    cpu_offload(model, execution_device="cpu", preload_module_classes=["CoupledLlamaAttention"])
    torch.testing.assert_close(output(model, token_ids()), expected)
    alone = hf.attach(tiny("llama"), coupling, seed=0)
    cpu_offload(alone, execution_device="cpu")
    with raises_code("weights-offloaded"):
        output(alone, token_ids())


def test_offload_qkflow_model() -> None:
    from accelerate import cpu_offload

    config = hf.QKFlowConfig(
        vocab_size=96, n_layers=2, dim=32, n_heads=4, tie_embeddings=False, attention={"coupling": "euler"}
    )
    model = hf.QKFlowForCausalLM(config).eval()
    expected = output(model, token_ids())
    cpu_offload(model, execution_device="cpu", preload_module_classes=["Block"])
    torch.testing.assert_close(output(model, token_ids()), expected)


class EightBit(nn.Module):
    """A linear layer with int8 weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).t()


def test_quantized_projections() -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, EightBit(getattr(layer.self_attn, name)))
    before = output(model, token_ids())
    hf.attach(model, "affine")
    assert torch.equal(output(model, token_ids()), before)
    hf.detach(model)
    hf.attach(model, "drift")
    with raises_code("adapted-projection"):
        hf.merge(model)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # operators without a vmap rule
@pytest.mark.parametrize("coupling", ["affine", "drift", "euler", "euler:n=3", "leapfrog"])
def test_vmap_and_jvp_match_eager(coupling: str) -> None:
    """Model ensembling with vmap, and forward-mode derivatives, in eval mode."""
    models = [hf.attach(tiny("llama"), coupling, seed=0) for _ in range(2)]
    for model in models:
        disturb(model)
        model.set_attn_implementation("eager")  # supports forward-mode differentiation
    layers = [model.model.layers[0].self_attn.eval() for model in models]
    states = torch.func.stack_module_state(layers)
    x, angles = torch.randn(1, 5, 64), torch.randn(1, 5, 16)
    options = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(layers[0], (parameters, buffers), (x,), options)[0]
        return out

    with torch.no_grad():
        alone = torch.stack([layer(x, **options)[0] for layer in layers])
        together = torch.func.vmap(run, (0, 0, None))(*states, x)
        torch.testing.assert_close(together, alone)
        step = 1e-3
        ahead, behind = (layers[0](x + sign * step * x.cos(), **options)[0] for sign in (1, -1))
        slope = torch.func.jvp(lambda x: layers[0](x, **options)[0], (x,), (x.cos(),))[1]
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("coupling", ["affine", "euler", "leapfrog"])
def test_selective_checkpointing_matches(coupling: str) -> None:
    kept = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")]

    def policy(context: object, operation: object, *args: object, **options: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    model = hf.attach(tiny("llama"), coupling, seed=0)
    disturb(model)
    gradients = []
    for options in ({}, {"context_fn": partial(create_selective_checkpoint_contexts, policy)}):
        model.zero_grad()
        checkpoint(
            lambda: model(input_ids=token_ids(), labels=token_ids()).loss, use_reentrant=False, **options
        ).backward()
        gradients.append(
            [p.grad.clone() for _, layer in hf.named_coupled_layers(model) for p in layer.parameters()]
        )
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "parametrize",
    [lambda layer: prune.l1_unstructured(layer, "weight", 0.5), parametrizations.weight_norm],
    ids=["pruned", "weight_norm"],
)
def test_merge_refuses_parametrized_weights(parametrize: Callable[[nn.Module], object]) -> None:
    model = hf.attach(tiny("llama"), "drift")
    for _, layer in hf.named_coupled_layers(model):
        parametrize(layer.q_proj)
    before = output(model, token_ids())
    with raises_code("parametrized-weight"):
        hf.merge(model)
    assert torch.equal(output(model, token_ids()), before)
