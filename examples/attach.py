"""Hugging Face: attach a coupling to a `transformers` model, train it alone, save it as an adapter."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from qkflow import hf

torch.manual_seed(0)
size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **size))  # or from_pretrained(...)
ids = torch.randint(256, (4, 32))
before = model(ids, labels=ids).loss

hf.attach(model, "affine", freeze_base=True)  # identity at init: nothing changes yet
print("unchanged:", torch.equal(model(ids, labels=ids).loss, before))
hf.print_trainable_parameters(model)

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for _ in range(20):
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {before.item():.4f} -> {loss.item():.4f}")

with tempfile.TemporaryDirectory() as folder:
    hf.save_adapter(model, folder)  # the added weights alone
    hf.load_adapter(hf.detach(model), folder)
