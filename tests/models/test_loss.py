import pytest
import torch

from qkflow.models.loss import linear_cross_entropy, linear_cross_entropy_reference


def problem(dtype=torch.float64, tokens=37, width=6, vocabulary=11):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (
        torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator)


def value_and_gradients(function, hidden, weight, targets, **options):
    loss = function(hidden, weight, targets, **options)
    return loss, *torch.autograd.grad(3 * loss, (hidden, weight))


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [0, 9])
def test_equals_the_textbook_form_in_float64(chunk, reduction, ignored):
    hidden, weight, targets = problem()
    targets[:ignored] = -100
    ours = value_and_gradients(
        linear_cross_entropy, hidden, weight, targets, reduction=reduction, chunk_size=chunk
    )
    textbook = value_and_gradients(
        linear_cross_entropy_reference, hidden, weight, targets, reduction=reduction
    )
    for mine, theirs in zip(ours, textbook, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_extreme_logits_neither_overflow_nor_vanish():
    hidden, weight, targets = problem()
    hidden = (hidden * 1000).detach().requires_grad_()
    for mine, theirs in zip(
        value_and_gradients(linear_cross_entropy, hidden, weight, targets, chunk_size=5),
        value_and_gradients(linear_cross_entropy_reference, hidden, weight, targets),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_shapes_with_a_batch_and_an_ignored_token_of_infinite_loss():
    hidden, weight, targets = problem(tokens=36)
    with torch.no_grad():
        hidden[3] = float("inf")
    targets[3] = -100
    loss = linear_cross_entropy(hidden.view(4, 9, 6), weight, targets.view(4, 9))
    keep = [i for i in range(36) if i != 3]
    torch.testing.assert_close(loss, linear_cross_entropy_reference(hidden[keep], weight, targets[keep]))


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_needs_a_gradient_gets_one(frozen):
    hidden, weight, targets = problem()
    parts = [hidden, weight]
    parts[frozen] = parts[frozen].detach()
    linear_cross_entropy(*parts, targets).backward()
    assert parts[frozen].grad is None
    assert parts[1 - frozen].grad is not None


def test_bf16_autocast_stays_close_to_exact():
    hidden, weight, targets = problem(torch.float32, tokens=200, width=32, vocab_size=50)
    exact = value_and_gradients(linear_cross_entropy_reference, hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        close = value_and_gradients(linear_cross_entropy, hidden, weight, targets, chunk_size=64)
    assert close[0].dtype == torch.float32
    for mine, theirs in zip(close, exact, strict=True):
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()


def test_without_gradients_nothing_is_computed_for_them():
    from qkflow.models import Decoder, preset
    from qkflow.models.cost import flops_per_token

    model = Decoder(preset("tiny", vocab_size=64, n_layers=1), seed=0)
    assert flops_per_token(model, 16) == 3 * flops_per_token(model, 16, training=False)


def test_where_no_token_counts_the_loss_and_its_gradient_are_zero():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((4,), -100))
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("target", [-1, 16])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(torch.randn(2, 8), torch.randn(16, 8), torch.tensor([3, target]))
