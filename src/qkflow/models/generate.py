"""Sampling: continue token sequences with a model, keeping what it has read in its caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkflow.attention import KVCache
from qkflow.errors import InputError
from qkflow.models.decoder import Decoder
from qkflow.models.decoding import CPUDecoder, PackedWeights
from qkflow.models.slow_path.cache import SlowPathCache

MIN_TOKENS_TO_PREPARE = 24  # tokens: fewer are sooner made by the model as it is


@dataclass(frozen=True)
class Sampler:
    """Chooses the next token from logits (B, V): temperature, then the k likeliest, then the likeliest p."""

    temperature: float = 1.0  # 0 = always the likeliest
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"the temperature must be zero or above, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top-k must leave at least one token, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top-p must lie above 0 and at most at 1, not {self.top_p}")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits = logits.float()
        # from the largest down, so that no temperature is too low
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature
        tokens = None
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits, tokens = logits.topk(self.top_k, dim=-1)
        elif self.top_p is not None and self.top_p < 1:
            logits, tokens = logits.sort(dim=-1, descending=True)
        shares = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            # keep a token while those before it have not reached p; topk and sort both put the likeliest
            # first
            shares = shares.masked_fill(shares.cumsum(dim=-1) - shares >= self.top_p, 0)
        drawn = torch.multinomial(shares, 1, generator=self.generator)
        return (drawn if tokens is None else tokens.gather(-1, drawn)).squeeze(-1)


def generate(
    model: Decoder,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    on_token: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Continue sequences of token ids (B, T) by up to `max_new` tokens: (B, T + new).

    temperature   0 = always the likeliest token; else the logits are divided by it
    top_k, top_p  draw from the k likeliest tokens only, from the fewest that together have probability p
    seed          the same seed draws the same tokens
    end           a token that ends a sequence; generation stops when all have ended
    padding       (B, T), True at real tokens: prompts of different lengths, filled up on the left
    stream        called with each new token (B,) as soon as it is known
    """
    _check_inputs(model, ids, max_new_tokens, attention_mask)
    device = model.embedding.weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    sampler = Sampler(temperature, top_k, top_p, generator)
    training = model.training
    model.eval()
    made = [ids.to(device)]
    ended = torch.zeros(len(ids), dtype=torch.bool, device=device)
    try:
        with torch.inference_mode():
            for token in _generate_tokens(model, made[0], max_new_tokens, sampler, attention_mask):
                if eos_token_id is not None:
                    token = token.masked_fill(ended, eos_token_id)
                    ended = ended | (token == eos_token_id)
                made.append(token[:, None])
                if on_token is not None:
                    on_token(token)
                if eos_token_id is not None and ended.all():
                    break
    finally:
        model.train(training)
    return torch.cat(made, dim=1)  # outside, so that it is a tensor like any other


def _generate_tokens(
    model: Decoder, ids: Tensor, max_new_tokens: int, sampler: Sampler, attention_mask: Tensor | None
) -> Iterator[Tensor]:
    """New tokens (B,), one after the other."""
    batch, length = ids.shape
    caches = model.new_caches(batch, length + max_new_tokens)
    if attention_mask is not None:
        yield from _generate_left_padded(
            model, ids, max_new_tokens, sampler, attention_mask.to(ids.device).bool()
        )
        return
    token = sampler(model.logits(model(ids, caches=caches)[:, -1]))
    yield token
    read = make_decode_step(model, caches, batch, max_new_tokens)
    for _ in range(max_new_tokens - 1):
        token = sampler(read(token))
        yield token


def make_decode_step(
    model: Decoder,
    caches: Sequence[KVCache | SlowPathCache],
    batch_size: int,
    n_tokens: int,
    packed_weights: PackedWeights | None = None,
) -> Callable[[Tensor], Tensor]:
    """The quickest way to read `count` tokens, each after the last: from tokens (B,) to logits (B, V)."""
    if batch_size == 1 and n_tokens > MIN_TOKENS_TO_PREPARE and CPUDecoder.supports(model):
        decoder = CPUDecoder(model, caches, packed_weights)
        return lambda token: decoder.logits(int(token))[None]
    return lambda token: model.logits(model(token[:, None], caches=caches)[:, -1])


def _generate_left_padded(
    model: Decoder, ids: Tensor, max_new_tokens: int, sampler: Sampler, attention_mask: Tensor
) -> Iterator[Tensor]:
    """The same for prompts filled up on the left: every row has positions of its own and sees no filling."""
    caches = model.new_caches(ids.shape[0], ids.shape[1] + max_new_tokens)
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    token = sampler(
        model.logits(model(ids, positions=positions, attention_mask=attention_mask, caches=caches)[:, -1])
    )
    yield token
    for _ in range(max_new_tokens - 1):
        attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], dim=1)
        positions = positions[:, -1:] + 1
        hidden = model(token[:, None], positions=positions, attention_mask=attention_mask, caches=caches)
        token = sampler(model.logits(hidden[:, -1]))
        yield token


def _check_inputs(model: Decoder, ids: Tensor, max_new_tokens: int, attention_mask: Tensor | None) -> None:
    if ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise InputError(
            "give token ids, whole numbers, of shape (batch, tokens) with at least one token, not "
            f"{tuple(ids.shape)} of {ids.dtype}"
        )
    if max_new_tokens < 1:
        raise InputError(f"the number of tokens to generate must be at least 1, not {max_new_tokens}")
    if int(ids.max()) >= model.config.vocab_size or int(ids.min()) < 0:
        raise InputError(f"a token id lies outside the model's vocabulary of {model.config.vocab_size}")
    if attention_mask is not None and (
        attention_mask.shape != ids.shape or not bool(attention_mask[:, -1].all())
    ):
        raise InputError("padding must have the shape of the ids and fill up prompts on the left")
