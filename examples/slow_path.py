"""Timescale: a slow path over blocks of 8 tokens. Does its gate open?"""

import torch

from qkflow.data import TrainWindows, prepare
from qkflow.measures.slow_path import slow_path_metrics
from qkflow.models import Decoder, preset

STEPS = 40
corpus = prepare("speeches", "bytes")
windows = TrainWindows(corpus.tokens("train"), seq_len=64, batch_size=8, seed=0)

for gate_init in (0.0, 0.1):
    slow = {"ratio": 8, "n_layers": 2, "gate_init": gate_init}
    model = Decoder(preset("tiny", vocab_size=257, slow=slow), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        batch = torch.from_numpy(windows.batch(step))
        loss = model.loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    share = slow_path_metrics(model, batch)["slow_share"][0]
    print(f"gate {gate_init} at init: loss {loss.item():.4f}, slow share of the residual stream {share:.4f}")
