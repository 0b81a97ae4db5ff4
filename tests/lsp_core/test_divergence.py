"""The divergence identity and its gradient against full logits."""

import pytest
import torch
import torch.nn.functional as F

from lsp_core import divergence as module
from lsp_core.divergence import divergence, label_statistic, teacher_statistic

# Unit roundoff of the arithmetic (float32 for both narrow types) times what the sums over V and D let it grow to.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5}


@pytest.fixture(params=[5, 64, 4096], ids="chunk{}".format)
def _chunk(request, monkeypatch):
    """Vocabularies of several chunks, and of a part of one."""
    monkeypatch.setattr(module, "VOCABULARY_CHUNK", request.param)


def problem(tokens: int, width: int, vocabulary: int, dtype: torch.dtype, *, bias: bool):
    """Teacher and student hidden states, head and bias in ``dtype``, and the same numbers in float64."""
    torch.manual_seed(tokens)
    exact = [
        torch.randn(tokens, width, dtype=torch.float64),
        torch.randn(tokens, width, dtype=torch.float64),
        torch.randn(vocabulary, width, dtype=torch.float64),
    ]
    narrow = [t.to(dtype) for t in exact]
    offset = torch.randn(vocabulary, dtype=torch.float64).to(dtype) if bias else None
    return narrow, offset, [t.double() for t in narrow], None if offset is None else offset.double()


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "width", "vocabulary"), [(1, 1, 2), (7, 5, 64), (13, 11, 147)])
def test_identity_and_gradient_against_full_logits(tokens, width, vocabulary, dtype, bias):
    (teacher, student, weight), offset, exact, exact_offset = problem(tokens, width, vocabulary, dtype, bias=bias)
    statistic = teacher_statistic(teacher, weight, offset)
    assert statistic.m.dtype == torch.promote_types(dtype, torch.float32)
    student.requires_grad_()
    kl = divergence(student, weight, offset, statistic)
    probe = torch.linspace(0.5, 2, tokens)  # a different weight on every token
    (kl * probe).sum().backward()

    exact[1].requires_grad_()
    log_p = F.linear(exact[0], exact[2], exact_offset).log_softmax(-1)
    log_q = F.linear(exact[1], exact[2], exact_offset).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    (expected * probe.double()).sum().backward()

    entropy = -(log_p.exp() * log_p).sum(-1)
    scale = F.linear(exact[1], exact[2], exact_offset).abs().max()  # what the identity's terms cancel from
    assert (statistic.entropy - entropy).abs().max() <= TOLERANCE[dtype] * scale
    assert (kl - expected).abs().max() <= TOLERANCE[dtype] * scale
    with torch.no_grad():  # the path without a gradient
        assert (divergence(student, weight, offset, statistic) - expected).abs().max() <= TOLERANCE[dtype] * scale
    stored = 2.0**-8 if dtype == torch.bfloat16 else TOLERANCE[dtype]  # a bfloat16 gradient is rounded once, at the end
    assert student.grad.dtype == dtype
    assert (student.grad - exact[1].grad).abs().max() <= stored * exact[1].grad.abs().max().clamp_min(1)


@pytest.mark.usefixtures("_chunk")
def test_vanishes_for_the_teacher_itself():
    (h, _, weight), bias, _, _ = problem(9, 11, 147, torch.float64, bias=True)
    h.requires_grad_()
    kl = divergence(h, weight, bias, teacher_statistic(h, weight, bias))
    kl.sum().backward()
    assert kl.abs().max() <= 1e-12
    assert h.grad.abs().max() <= 1e-12


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_cross_entropy_is_the_same_identity(dtype, bias):
    (_, student, weight), offset, exact, exact_offset = problem(13, 11, 147, dtype, bias=bias)
    labels = torch.randint(147, (13,))
    student.requires_grad_()
    loss = divergence(student, weight, offset, label_statistic(labels, weight, offset))
    loss.mean().backward()
    exact[1].requires_grad_()
    expected = F.cross_entropy(F.linear(exact[1], exact[2], exact_offset), labels, reduction="none")
    expected.mean().backward()
    scale = F.linear(exact[1], exact[2]).abs().max()
    stored = 2.0**-8 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    assert (loss - expected).abs().max() <= TOLERANCE[dtype] * scale
    assert (student.grad - exact[1].grad).abs().max() <= stored * exact[1].grad.abs().max()


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_do_not_overflow(size):
    """Logits of +-1e4 and more in every chunk; float32 exponentials end at 88."""
    torch.manual_seed(0)
    h = torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.0, 0.0]])
    weight = torch.cat([torch.full((147, 1), size) + torch.arange(147.0)[:, None], torch.randn(147, 1)], 1)
    teacher = torch.tensor([[1.0, 0.2], [-1.0, 0.0], [0.0, 3.0]])
    student = h.clone().requires_grad_()
    kl = divergence(student, weight, None, teacher_statistic(teacher, weight))
    kl.sum().backward()
    log_p = (teacher.double() @ weight.double().T).log_softmax(-1)
    log_q = (h.double() @ weight.double().T).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert torch.isfinite(student.grad).all()
    # float32 holds a logit of 1e4 to 1e-3, and a few of them are added
    assert (kl - expected).abs().max() <= 1e-2
    with torch.no_grad():
        assert (divergence(student, weight, None, teacher_statistic(teacher, weight)) - expected).abs().max() <= 1e-2


def test_statistic_is_cut_by_tokens():
    (teacher, student, weight), bias, _, _ = problem(9, 4, 33, torch.float64, bias=True)
    statistic = teacher_statistic(teacher, weight, bias)
    whole = divergence(student, weight, bias, statistic)
    rows = torch.tensor([7, 0, 3])
    assert torch.allclose(divergence(student[rows], weight, bias, statistic[rows]), whole[rows], rtol=0, atol=1e-13)


def test_head_and_statistic_get_no_gradient():
    (teacher, student, weight), bias, _, _ = problem(3, 4, 33, torch.float64, bias=True)
    weight.requires_grad_()
    student.requires_grad_()
    statistic = teacher_statistic(teacher, weight, bias)
    assert not statistic.m.requires_grad
    divergence(student, weight, bias, statistic).sum().backward()
    assert weight.grad is None
