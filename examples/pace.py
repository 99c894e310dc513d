"""Pace: let the query-key circuit learn faster, and measure how far each circuit has moved."""

import torch

from qkflow import hf
from qkflow.data import TrainWindows, prepare
from qkflow.measures.circuits import CircuitTracker
from qkflow.models import Decoder, preset

STEPS = 40
corpus = prepare("speeches", "bytes")
windows = TrainWindows(corpus.tokens("train"), seq_len=64, batch_size=8, seed=0)

for ratio in (0.25, 1, 4):
    model = Decoder(preset("tiny", vocab_size=257), seed=0)
    tracker = CircuitTracker(model)
    optimizer = torch.optim.AdamW(hf.param_groups(model, lr=3e-3, ratio=ratio))
    for step in range(STEPS):
        batch = torch.from_numpy(windows.batch(step))
        loss = model.loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pace = tracker.metrics(model)["effective_pace"]
    print(f"ratio {ratio}: loss {loss.item():.4f}, effective pace {pace:.2f}")
