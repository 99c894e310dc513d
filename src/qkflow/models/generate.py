"""Text generation: sampling with key/value caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkflow.attention import KVCache
from qkflow.attention.attention import prepared_for_inference
from qkflow.attention.inference import eval_mode
from qkflow.errors import InputError
from qkflow.models.cpu_decoder import CPUDecoder, PackedWeights
from qkflow.models.decoder import Decoder
from qkflow.models.slow_path.cache import SlowPathCache

MIN_TOKENS_TO_PREPARE = 24  # for fewer, packing the weights takes longer than it saves


@dataclass(frozen=True)
class Sampler:
    """Samples the next token from logits (B, V): temperature, then top-k, then top-p."""

    temperature: float = 1.0  # 0 = argmax
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(
                f"temperature must be zero or above, not {self.temperature}", code="bad-temperature"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, not {self.top_k}", code="bad-top-k")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be in (0, 1], not {self.top_p}", code="bad-top-p")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature < torch.finfo(torch.float32).tiny:  # zero, or zero once it is a float32
            return logits.argmax(dim=-1)
        logits = logits.float()
        # relative to the maximum, so that a low temperature cannot overflow
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature
        tokens = None
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits, tokens = logits.topk(self.top_k, dim=-1)
        elif self.top_p is not None and self.top_p < 1:
            logits, tokens = logits.sort(dim=-1, descending=True)
        probs = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            # keep a token while those before it have not reached p; topk and sort are both descending
            is_beyond = probs.cumsum(dim=-1) - probs >= self.top_p
            is_beyond[..., 0] = False  # a p that is zero in float32 keeps the first token too
            probs = probs.masked_fill(is_beyond, 0)
        try:
            sampled = torch.multinomial(probs, 1, generator=self.generator)
        except RuntimeError:
            if bool(probs.isfinite().all()):
                raise
            raise InputError(
                "the model computes NaN or infinite probabilities: its weights are damaged, or its training "
                "diverged",
                code="non-finite-output",
            ) from None
        return (sampled if tokens is None else tokens.gather(-1, sampled)).squeeze(-1)


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
    """Continue token ids (B, T) by up to `max_new_tokens`: (B, T + new).

    Attention layers are prepared for inference while this runs.

    temperature     0 = argmax; else the logits are divided by it
    top_k, top_p    sample from the k most probable tokens only, from the fewest with total probability p
    seed            the same seed samples the same tokens
    eos_token_id    ends a sequence; generation stops when all have ended
    attention_mask  (B, T), True at real tokens: prompts of different lengths, padded on the left
    on_token        called with each new token (B,)
    """
    _check_inputs(model, ids, max_new_tokens, attention_mask)
    device = model.embedding.weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    sampler = Sampler(temperature, top_k, top_p, generator)
    tokens = [ids.to(device)]
    ended = torch.zeros(len(ids), dtype=torch.bool, device=device)
    with eval_mode(model), torch.inference_mode(), prepared_for_inference(model):
        for token in _generate_tokens(model, tokens[0], max_new_tokens, sampler, attention_mask):
            if eos_token_id is not None:
                token = token.masked_fill(ended, eos_token_id)
                ended = ended | (token == eos_token_id)
            tokens.append(token[:, None])
            if on_token is not None:
                on_token(token)
            if eos_token_id is not None and ended.all():
                break
    return torch.cat(tokens, dim=1)  # outside of inference mode


def _generate_tokens(
    model: Decoder, ids: Tensor, max_new_tokens: int, sampler: Sampler, attention_mask: Tensor | None
) -> Iterator[Tensor]:
    """Yield new tokens (B,)."""
    if attention_mask is not None:
        yield from _generate_left_padded(
            model, ids, max_new_tokens, sampler, attention_mask.to(ids.device).bool()
        )
        return
    batch_size, length = ids.shape
    caches = model.new_caches(batch_size, length + max_new_tokens)
    token = sampler(model.logits(model(ids, caches=caches)[:, -1]))
    yield token
    decode = make_decode_step(model, caches, batch_size, max_new_tokens)
    for _ in range(max_new_tokens - 1):
        token = sampler(decode(token))
        yield token


def make_decode_step(
    model: Decoder,
    caches: Sequence[KVCache | SlowPathCache],
    batch_size: int,
    n_tokens: int,
    packed_weights: PackedWeights | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return a function from tokens (B,) to next-token logits (B, V), for `n_tokens` calls."""
    if batch_size == 1 and n_tokens > MIN_TOKENS_TO_PREPARE and CPUDecoder.supports(model):
        decoder = CPUDecoder(model, caches, packed_weights)
        return lambda token: decoder.logits(int(token))[None]
    return lambda token: model.logits(model(token[:, None], caches=caches)[:, -1])


def _generate_left_padded(
    model: Decoder, ids: Tensor, max_new_tokens: int, sampler: Sampler, attention_mask: Tensor
) -> Iterator[Tensor]:
    """Yield new tokens for left-padded prompts: every row has its own positions and ignores padding."""
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
            "ids must be integer token ids of shape (batch, tokens) with at least one token, not "
            f"{tuple(ids.shape)} of {ids.dtype}",
            code="token-ids-shape",
        )
    if max_new_tokens < 1:
        raise InputError(
            f"max_new_tokens must be at least 1, not {max_new_tokens}", code="bad-max-new-tokens"
        )
    if int(ids.max()) >= model.config.vocab_size or int(ids.min()) < 0:
        raise InputError(
            f"a token id is outside the vocabulary of {model.config.vocab_size}", code="token-id-out-of-range"
        )
    if attention_mask is not None and (
        attention_mask.shape != ids.shape or not bool(attention_mask[:, -1].all())
    ):
        raise InputError(
            "attention_mask must have the shape of ids, with padding on the left", code="attention-mask-shape"
        )
