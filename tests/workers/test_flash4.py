"""FlashAttention 4's operator, with the arithmetic of its kernels done by torch: what it hands over and gives back."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from examples.countdown import make_model
from grpo.config import ConfigError
from workers.config import ModelConfig
from workers.parallel import attention, attention_backend, policy
from workers.parallel.attention import PackedSequences, flash4, packed_attention
from workers.parallel.attention_backend import flash4_failure, why_not, why_not_flash4

LENGTHS, CPU = [7, 1, 12, 4], torch.device("cpu")


def attend(q, k, v, *, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale):
    """What FlashAttention's kernels compute from such arguments."""
    assert causal is True
    assert cu_seqlens_q is cu_seqlens_k
    assert cu_seqlens_q.dtype == torch.int32
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_k == max(lengths)
    return packed_attention(q, k, v, softmax_scale, PackedSequences.of(lengths, CPU))


@pytest.fixture
def kernels(monkeypatch):
    """Functions with the arguments of FlashAttention's, that may return more than is read."""

    def forward(q, k, v, *, return_lse, **given):
        assert return_lse
        return attend(q, k, v, **given), torch.zeros(q.shape[1], q.shape[0]), None, None

    def backward(q, k, v, out, grad, lse, **given):
        assert lse.shape == (q.shape[1], q.shape[0])

        def differentiate():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            again = attend(*inputs, **given)
            torch.testing.assert_close(again.detach(), out)
            return torch.autograd.grad(again, inputs, grad)

        # In a thread of its own: inside an operator autograd is off.
        with ThreadPoolExecutor() as pool:
            return *pool.submit(differentiate).result(), None

    monkeypatch.setattr(attention, "kernels", lambda: (forward, backward))


def by_flash4(q, k, v, sequences):
    return flash4(q, k, v, sequences.cu_seqlens, sequences.max_seqlen, 0.3)[0]


def test_what_the_kernels_compute_reaches_its_place(kernels):
    sequences = PackedSequences.of(LENGTHS, CPU)
    heads = [torch.randn(sum(LENGTHS), n, 8).requires_grad_() for n in (6, 2, 2)]
    outs = by_flash4(*heads, sequences), packed_attention(*heads, 0.3, sequences)
    direction = torch.randn(outs[0].shape)
    torch.testing.assert_close(*((out, *torch.autograd.grad(out, heads, direction)) for out in outs))


def test_compiled_it_is_one_graph_for_all_lengths(kernels):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(hidden, position_embeddings, sequences):
        heads = (hidden * position_embeddings[0]).view(-1, 10, 8).split((6, 2, 2), dim=1)
        return 2 * by_flash4(*heads, sequences)

    compiled = functools.partial(policy._for_any_length, torch.compile(layer, fullgraph=True, backend=counter))
    for lengths in (LENGTHS, [3, 9], [5, 20, 2, 2, 8]):
        sequences, results = PackedSequences.of(lengths, CPU), []
        hidden, *angles = torch.randn(3, 1, sum(lengths), 80)
        hidden.requires_grad_()
        for forward in (compiled, layer):
            out = forward(hidden, position_embeddings=tuple(angles), sequences=sequences)
            results.append((out, *torch.autograd.grad(out.square().sum(), hidden)))
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


def test_a_cpu_has_none_and_says_so():
    config = make_model("qwen2").config
    assert "not a Hopper" in why_not_flash4(ModelConfig(), config, CPU)
    with pytest.raises(ConfigError, match=r"model\.attention=flash4 cannot be: the device is not a Hopper GPU"):
        why_not_flash4(ModelConfig(attention="flash4"), config, CPU)


def test_a_name_that_is_no_choice_is_refused():
    with pytest.raises(ConfigError, match=r"model\.attention='fa3' is not a choice: use one of auto, torch, flash4"):
        why_not_flash4(ModelConfig(attention="fa3"), make_model("qwen2").config, CPU)


def test_a_package_that_cannot_be_imported_is_a_reason_and_no_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def broken(name):
        raise AttributeError("module 'cutlass' has no attribute 'cute'")

    monkeypatch.setattr(attention.importlib, "import_module", broken)
    monkeypatch.setattr(attention_backend, "kernels", attention.kernels.__wrapped__)
    assert "no attribute 'cute'" in why_not.__wrapped__(torch.device("cuda", 7))


def failure() -> str:
    """flash4_failure of small heads, tried anew each time."""
    return flash4_failure.__wrapped__(CPU, torch.bfloat16, 6, 2, 8)


def test_a_trial_says_nothing_of_kernels_that_are_right(kernels):
    assert failure() == ""


def fails(*_, **__):
    raise RuntimeError("no ptxas\nand many lines more")


@pytest.mark.parametrize("broken", ["forward", "backward"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda x: 1.1 * x, "are 10.0% away"),
        (lambda x: x.index_fill(0, torch.tensor([302, 400]), 0.0), "% away"),
        (lambda x: x * float("nan"), "nan% away"),
        (fails, "kernels fail here (RuntimeError: no ptxas)"),
    ],
)
def test_a_trial_tells_of_a_pass_that_is_wrong_or_fails(kernels, monkeypatch, broken, spoil, reason):
    (forward, backward), right = attention.kernels(), []

    def forward_spoiled(*args, **given):
        out, *others = forward(*args, **given)
        right.append(out)
        return spoil(out) if broken == "forward" else out, *others

    def backward_spoiled(q, k, v, _, *args, **given):
        grad_q, *others = backward(q, k, v, right[-1], *args, **given)
        return spoil(grad_q) if broken == "backward" else grad_q, *others

    monkeypatch.setattr(attention, "kernels", lambda: (forward_spoiled, backward_spoiled))
    assert reason in failure()


@pytest.mark.parametrize(
    ("settings", "width", "reason"),
    [
        ({}, 64, ""),
        ({"attention": "flash4"}, 128, ""),
        ({"attention": "torch"}, 64, "model.attention=torch"),
        ({"dtype": "float32"}, 64, "float32"),
        ({}, 80, "80 wide"),
    ],
)
def test_it_is_chosen_where_it_can_be(monkeypatch, settings, width, reason):
    monkeypatch.setattr(attention_backend, "why_not", lambda device: "")
    monkeypatch.setattr(attention_backend, "flash4_failure", lambda *_: "")
    config = make_model("qwen2", heads=2, kv_heads=1, head_dim=width).config
    found = why_not_flash4(ModelConfig(**{"dtype": "bfloat16", **settings}), config, CPU)
    assert found == reason if not reason else reason in found


def test_where_its_trial_fails_it_is_not_chosen_and_refused_where_it_was_asked_for(monkeypatch):
    asked, config = [], make_model("qwen2", heads=4, kv_heads=2, head_dim=64).config
    monkeypatch.setattr(attention_backend, "why_not", lambda device: "")
    monkeypatch.setattr(attention_backend, "flash4_failure", lambda *given: asked.append(given) or "its kernels fail")
    assert why_not_flash4(ModelConfig(dtype="bfloat16"), config, CPU) == "its kernels fail"
    with pytest.raises(ConfigError, match=r"model\.attention=flash4 cannot be: its kernels fail\. Use auto or torch"):
        why_not_flash4(ModelConfig(dtype="bfloat16", attention="flash4"), config, CPU)
    assert asked == [(CPU, torch.bfloat16, 4, 2, 64)] * 2
