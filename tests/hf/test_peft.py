"""Couplings and LoRA on the same model, whichever comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)

from families import disturb, output, tiny, token_ids
from input_errors import raises_code
from qkflow import hf
from qkflow.attention import merge
from qkflow.models import Decoder, preset


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False, **options)


def with_lora(model: Any, **options: Any) -> PeftModel:
    torch.manual_seed(3)
    return get_peft_model(model, lora(**options))


def merged_then_coupled(coupling: str) -> torch.Tensor:
    """Output with LoRA merged into the weights before attaching: the expected result of both orders."""
    model = hf.attach(with_lora(tiny("llama")).merge_and_unload(), coupling, seed=0)
    disturb(model)
    return output(model, token_ids())


def test_attach_to_lora_model() -> None:
    model = hf.attach(with_lora(tiny("llama")), "euler", seed=0)
    disturb(model)
    torch.testing.assert_close(output(model, token_ids()), merged_then_coupled("euler"))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or ".coupling." in name for name in trainable)
    assert any(".coupling." in name for name in trainable)
    assert any("lora_" in name for name in trainable)


def test_lora_on_coupled_model(tmp_path: Path) -> None:
    coupled = hf.attach(tiny("llama"), "euler", seed=0)
    disturb(coupled)
    model = with_lora(coupled, modules_to_save=["coupling"])
    torch.testing.assert_close(output(model, token_ids()), merged_then_coupled("euler"))
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    graded = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any("coupling" in name for name in graded)
    assert all("lora_" in name or "coupling" in name for name in graded)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.1)
    hf.save_adapter(model, tmp_path)
    other = hf.load_adapter(with_lora(tiny("llama")), tmp_path)
    torch.testing.assert_close(output(other, token_ids()), output(model, token_ids()))


def test_freeze_base_keeps_lora_trainable() -> None:
    model = hf.attach(with_lora(tiny("llama")), "affine")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    hf.freeze_base_model(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or ".coupling." in name for name in trainable)
    assert any("lora_" in name for name in trainable)


def test_freeze_base_keeps_ia3_trainable() -> None:
    config = IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[])
    model = get_peft_model(tiny("llama"), config)
    before = {name for name, p in model.named_parameters() if p.requires_grad}
    hf.attach(model, "euler", freeze_base=True)
    after = {name for name, p in model.named_parameters() if p.requires_grad}
    assert before <= after
    assert all(".coupling." in name for name in after - before)


def test_qkflow_merge_refuses_lora() -> None:
    decoder = Decoder(preset("tiny", vocab_size=32, attention={"coupling": "drift"}), seed=0)
    inject_adapter_in_model(LoraConfig(target_modules=["q", "k"]), decoder)
    with raises_code("merge-projection-not-plain"):
        merge(decoder)


@pytest.mark.parametrize("kind", [PrefixTuningConfig, PromptTuningConfig])
def test_prefix_and_prompt_tuning_of_qkflow_model(kind: type[PeftConfig]) -> None:
    config = hf.QKFlowConfig(
        vocab_size=96, n_layers=2, dim=64, n_heads=4, n_kv_heads=2, attention={"coupling": "euler"}
    )
    model = get_peft_model(hf.QKFlowForCausalLM(config), kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert model.generate(input_ids=token_ids(), max_new_tokens=2, pad_token_id=0).shape[1] > 2


def test_merge_refuses_lora() -> None:
    model = hf.attach(with_lora(tiny("llama")), "drift")
    with raises_code("adapted-projection"):
        hf.merge(model)
