"""The chunked loss against F.cross_entropy on the full logits: value and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import modeling.loss
from modeling.kernels import row_passes
from modeling.kernels.fuse import compiled
from modeling.loss import (
    IGNORE,
    Head,
    WeightGradient,
    chunk_tokens,
    logits_gradient,
    losses_and_gradient,
    product_in,
    scaled,
)

FEW = settings(max_examples=40, deadline=None, derandomize=True)


def problem(n_tokens: int, vocab_size: int, ignored: float, seed: int) -> tuple[Head, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    head = Head(vocab_size, 12)
    head.weight.data = torch.randn(vocab_size, 12, generator=generator)
    targets_T = torch.randint(vocab_size, (n_tokens,), generator=generator)
    targets_T[torch.rand(n_tokens, generator=generator) < ignored] = IGNORE
    return head, torch.randn(1, n_tokens, 12, generator=generator, requires_grad=True), targets_T[None]


def plain_logits(head: Head, hidden_BSD: Tensor) -> Tensor:
    logits_TV = F.linear(hidden_BSD.double(), head.weight.double()).flatten(0, 1)
    return logits_TV if head.logit_cap is None else head.logit_cap * torch.tanh(logits_TV / head.logit_cap)


def plain_loss(head: Head, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
    logits_TV = plain_logits(head, hidden_BSD)
    return F.cross_entropy(logits_TV, targets_BS.flatten(), ignore_index=IGNORE, reduction="sum")


def plain_z_loss(head: Head, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
    """The squared logarithms of the partition functions, of those targets that count."""
    logits_TV = plain_logits(head, hidden_BSD)
    return logits_TV[targets_BS.flatten() != IGNORE].exp().sum(-1).log().square().sum()


def compare(head: Head, hidden_BSD: Tensor, targets_BS: Tensor, scale: float) -> None:
    """Against fp64: the sums to 1e-6 relative, gradients to 1e-6 of their norm and to what rounding leaves of them.

    Of a target that the head is nearly sure of, the logit's gradient is the small difference of two numbers near one,
    each rounded by up to 2^-24: its gradients are as wrong as that, however small they are. A z-loss adds its own.
    """
    loss, z_loss = head(hidden_BSD, targets_BS)
    expected, expected_z = (plain(head, hidden_BSD, targets_BS) for plain in (plain_loss, plain_z_loss))
    assert loss.dtype == z_loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(z_loss, expected_z, rtol=1e-6, atol=1e-6)
    assert not z_loss.requires_grad
    expected = expected + head.z_loss * expected_z
    gradients = torch.autograd.grad(loss * scale, [hidden_BSD, head.weight])
    references = torch.autograd.grad(expected * scale, [hidden_BSD, head.weight])
    rounding = 2.0**-22 * scale * hidden_BSD.shape[1] ** 0.5
    factors = (head.weight.detach(), hidden_BSD.detach())  # what the logits' gradients are multiplied by
    for gradient, reference, factor in zip(gradients, references, factors, strict=True):
        assert (gradient - reference).norm() <= 1e-6 * reference.norm() + rounding * factor.norm()


@FEW
@given(
    n_tokens=st.integers(1, 40),
    vocab_size=st.integers(2, 50),
    chunk=st.integers(1, 45),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
    z_loss=st.sampled_from([0.0, 1e-4, 0.5]),
    logit_cap=st.sampled_from([None, 2.0]),
)
def test_equals_cross_entropy(
    n_tokens: int, vocab_size: int, chunk: int, ignored: float, seed: int, z_loss: float, logit_cap: float | None
) -> None:
    """Whatever the chunks, and wherever their boundaries lie, with a z-loss or a cap on the logits and without."""
    head, *batch = problem(n_tokens, vocab_size, ignored, seed)
    head.z_loss, head.logit_cap = z_loss, logit_cap
    head.chunk_logits = chunk * vocab_size
    compare(head, *batch, scale=1 / 7)


def test_chunk_smaller_than_the_vocabulary() -> None:
    head, *batch = problem(5, 50, 0.2, 0)
    head.chunk_logits = 3
    compare(head, *batch, scale=1.0)


@pytest.mark.parametrize(
    ("vocab_size", "device", "n_tokens"),
    [(4096, "cpu", 512), (131_072, "cpu", 256), (1 << 20, "cpu", 32), (131_072, "meta", 2048), (1 << 30, "meta", 1)],
)
def test_chunks_follow_the_device(vocab_size: int, device: str, n_tokens: int) -> None:
    """On a CPU logits fit into caches, in 32 bits too; elsewhere, here without memory, into 3 GiB. A size wins."""
    weight_VD = torch.empty(1, device=device, dtype=torch.bfloat16).expand(vocab_size, 1)
    assert chunk_tokens(None, weight_VD) == n_tokens
    assert chunk_tokens(None, weight_VD.float()) == (n_tokens // 2 if device == "cpu" else n_tokens)
    assert chunk_tokens(3 * vocab_size, weight_VD) == 3


def test_frozen_head_and_frozen_hidden() -> None:
    """Only what requires a gradient gets one."""
    head, hidden_BSD, targets_BS = problem(9, 20, 0.0, 0)
    head.weight.requires_grad_(False)
    head(hidden_BSD, targets_BS)[0].backward()
    assert hidden_BSD.grad is not None
    head.weight.requires_grad_(True)
    head(hidden_BSD.detach(), targets_BS)[0].backward()
    assert head.weight.grad is not None


def test_bf16_weights_get_bf16_gradients_summed_in_fp32() -> None:
    """Many chunks lose no more than one: 1e-2 of the norm is bf16's rounding of the logits' gradients."""
    head, hidden_BSD, targets_BS = problem(400, 20, 0.1, 0)
    reference = torch.autograd.grad(plain_loss(head, hidden_BSD, targets_BS), head.weight)[0]
    half = Head(20, 12)
    half.chunk_logits = 20
    half.weight.data = head.weight.detach().bfloat16()
    half(hidden_BSD.detach().bfloat16(), targets_BS)[0].backward()
    assert half.weight.grad is not None
    assert half.weight.grad.dtype == torch.bfloat16
    assert (half.weight.grad.float() - reference).norm() < 1e-2 * reference.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cached", [1, 77])
def test_pieces_in_cache_change_nothing(cached: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients are the same numbers however few logits, and rows of a weight, are taken at once."""
    found = []
    for n_cached in (1 << 18, cached):
        monkeypatch.setattr(modeling.loss, "CPU_CACHED", n_cached)
        head, hidden_BSD, targets_BS = problem(50, 20, 0.3, 0)
        head.z_loss, head.chunk_logits = 1e-2, 20 * 16
        head.to(dtype)
        hidden_BSD = hidden_BSD.detach().to(dtype).requires_grad_()
        sums = head(hidden_BSD, targets_BS)
        found.append([*sums, *torch.autograd.grad(sums[0], [hidden_BSD, head.weight])])
    for whole, in_pieces in zip(*found, strict=True):
        assert torch.equal(whole, in_pieces)


def test_no_target_counts() -> None:
    head, hidden_BSD, targets_BS = problem(6, 20, 1.0, 0)
    loss, _ = head(hidden_BSD, targets_BS)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not hidden_BSD.grad.any()


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("fault", ["labels shifted", "ignored counted", "boundary skipped", "z-loss not squared"])
def test_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden_BSD, targets_BS = problem(30, 20, 0.3, 0)
    head.z_loss = 1e-4
    match fault:
        case "labels shifted":
            forward = Head.forward
            monkeypatch.setattr(
                Head, "forward", lambda self, hidden, targets: forward(self, hidden, targets.roll(1, 1))
            )
        case "ignored counted":
            monkeypatch.setattr(
                modeling.loss,
                "logits_gradient",
                lambda logits, targets, counts, slope: logits_gradient(logits, targets, torch.ones_like(counts), slope),
            )
        case "z-loss not squared":
            monkeypatch.setattr(modeling.loss, "z_slope", lambda logs, z_loss: torch.full_like(logs, z_loss))
        case "boundary skipped":
            head.chunk_logits = 20 * 7
            monkeypatch.setattr(modeling.loss, "slice", lambda start, stop: slice(start, stop - 1), raising=False)
    with pytest.raises((AssertionError, RuntimeError)):
        compare(head, hidden_BSD, targets_BS, scale=1.0)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed in C++."""
    monkeypatch.setattr(row_passes, "fits", lambda *tensors: False)


def check_narrow(dtype: torch.dtype) -> None:
    """Losses and their squares to fp32's rounding, and the gradient to its own, by the very logits in fp64."""
    generator = torch.Generator().manual_seed(3)
    for vocab_size, scale in ((2, 1.0), (11, 0.1), (1000, 1.0), (1000, 30.0), (70000, 5.0)):
        logits_TV = (scale * torch.randn(40, vocab_size, generator=generator)).to(dtype)
        logits_TV[3, 0] = -torch.inf
        targets_T = torch.randint(1, vocab_size, (40,), generator=generator)
        targets_T[::7] = IGNORE
        counts_T, exact_TV = targets_T != IGNORE, logits_TV.double().requires_grad_()
        logs_T = exact_TV.logsumexp(-1) * counts_T
        exact_T = F.cross_entropy(exact_TV, targets_T, ignore_index=IGNORE, reduction="none")
        (exact_T.sum() + 1e-2 * logs_T.square().sum()).backward()
        losses_T, squares_T, grad_TV = losses_and_gradient(logits_TV.clone(), targets_T, True, 1e-2)
        torch.testing.assert_close(losses_T.double(), exact_T.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(squares_T.double(), logs_T.detach().square(), rtol=1e-5, atol=1e-5)
        assert grad_TV is not None and exact_TV.grad is not None and grad_TV.dtype == dtype
        tiny = {torch.bfloat16: 1e-30, torch.float16: 2**-24}[dtype]  # what the dtype cannot hold
        torch.testing.assert_close(grad_TV.double(), exact_TV.grad, rtol=2**-7, atol=tiny + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_narrow_logits_are_those_in_fp64(dtype: torch.dtype) -> None:
    check_narrow(dtype)


@pytest.mark.usefixtures("by_torch")
def test_losses_by_torchs_operations_are_those_in_fp64() -> None:
    check_narrow(torch.bfloat16)


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("planted", ["a sum that is off", "another row's"])
def test_planted_narrow_losses_are_seen(monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    softmax = torch.softmax

    def wrong(logits_TV: Tensor, dim: int, out: Tensor) -> Tensor:
        softmax(logits_TV, dim, out=out)
        return out.mul_(1.001) if planted == "a sum that is off" else out.copy_(out.roll(1, 0))

    monkeypatch.setattr(torch, "softmax", wrong)
    with pytest.raises(AssertionError):
        check_narrow(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_narrow_loss_is_multiplied_by_is_not_rounded(dtype: torch.dtype) -> None:
    """Rounded to 16 bits the factor would be 1, and gradients as they are without it."""
    head, hidden_BSD, targets_BS = problem(20, 7, 0.3, seed=4)
    head, hidden_BSD = head.to(dtype), hidden_BSD.detach().to(dtype).requires_grad_()
    given, factor = [hidden_BSD, head.weight], torch.tensor(1 + torch.finfo(dtype).eps / 2)
    whole, scaled = (torch.autograd.grad(head(hidden_BSD, targets_BS)[0] * by, given) for by in (1.0, factor))
    assert torch.equal(scaled[0], (whole[0].float() * factor).to(dtype))
    assert not any(map(torch.equal, whole, scaled))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weights_gradient_does_not_read_what_its_memory_held(dtype: torch.dtype) -> None:
    """It is given memory of any values, and the first chunk writes it; without a chunk it is zero.

    Planted: a sum that adds to what was there is seen, for that is not a number.
    """
    generator = torch.Generator().manual_seed(0)
    chunks = [[torch.randn(3, width, generator=generator).to(dtype) for width in (6, 4)] for _ in range(3)]
    wanted = sum((grad_TV.T @ hidden_TD).float() for grad_TV, hidden_TD in chunks)
    for n_chunks in (0, 3):
        sum_VD = torch.full((6, 4), torch.nan)
        gradient = WeightGradient(sum_VD, torch.empty(6, 4, dtype=dtype))
        for chunk in chunks[:n_chunks]:
            gradient(*chunk)
        gradient.end()
        torch.testing.assert_close(sum_VD, wanted if n_chunks else torch.zeros(6, 4), rtol=1e-6, atol=1e-6)
    gradient = WeightGradient(torch.full((6, 4), torch.nan), torch.empty(6, 4, dtype=dtype))
    gradient.is_empty = False
    gradient(*chunks[0])
    assert gradient.sum_VD is not None and gradient.sum_VD.isnan().all()


@pytest.mark.xdist_group("fuse")
def test_a_gradient_is_scaled_by_one_compiled_kernel_as_plainly() -> None:
    """As on a GPU: in fp32, and rounded once."""
    matrix, factor = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)), torch.tensor(0.3)
    made = compiled(product_in, matrix, factor, dtype=torch.bfloat16)
    assert made.dtype == torch.bfloat16 and torch.equal(made, scaled(matrix, factor, torch.bfloat16))


def test_a_gradient_scaled_plainly_takes_no_second_matrix_in_fp32() -> None:
    """As on a GPU where nothing is compiled: of a head's weight that would be gigabytes."""

    class Made(TorchDispatchMode):
        bytes_made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            self.bytes_made += 0 if (kwargs or {}).get("out") is not None else made.nbytes
            return made

    matrix, factor = torch.empty(40, 16, device="meta"), torch.empty((), device="meta")
    with Made() as seen:
        assert scaled(matrix, factor, torch.bfloat16).dtype == torch.bfloat16
    assert seen.bytes_made == 40 * 16 * 2
    with Made() as seen:
        product_in(matrix, factor, dtype=torch.bfloat16)  # which is for a compiler
    assert seen.bytes_made > 40 * 16 * 4
