"""Coupling: train a small decoder with and without one, from the same init and on the same batches."""

import torch

from qkflow.data import TrainWindows, prepare
from qkflow.models import Decoder, preset

STEPS = 40
corpus = prepare("speeches", "bytes")
windows = TrainWindows(corpus.tokens("train"), seq_len=64, batch_size=8, seed=0)

for coupling in ("none", "drift", "leapfrog:n=7"):
    model = Decoder(preset("tiny", vocab_size=257, attention={"coupling": coupling}), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        batch = torch.from_numpy(windows.batch(step))
        loss = model.loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{coupling:<13} {count:,} parameters, loss {loss.item():.4f} after {STEPS} steps")
