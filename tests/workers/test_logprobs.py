"""The head against the full softmax in float64, whole and cut over processes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.collective_probe import head_problem, head_with_loss_inside, plain_head
from workers.parallel import logprobs
from workers.parallel.logprobs import Head, head_logprobs, head_loss


def full_softmax(given, temperature):
    """logprobs, entropy and the gradients of their weighted sum to hidden and weight, all in float64."""
    hidden = given["hidden"].detach().double().requires_grad_()
    weight = given["weight"].detach().double().requires_grad_()
    logp = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    logprobs = logp[torch.arange(len(hidden)), given["targets"]]
    entropy = -(logp.exp() * logp).sum(-1)
    (logprobs @ given["of_logprobs"].double() + entropy @ given["of_entropy"].double()).backward()
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad}


WAYS = [plain_head, head_with_loss_inside]


def assert_agree(result, expected, tolerance=1e-5):
    for name, value in expected.items():
        assert result[name].dtype == torch.float32
        # Of the largest entry: what cancels in a small one is rounded as the large ones are, on each CPU otherwise.
        atol = tolerance * max(1.0, float(value.abs().max())) if value.numel() else 0.0
        torch.testing.assert_close(result[name].double(), value, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 2048])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_the_full_softmax(way, temperature, chunk):
    given = head_problem()
    assert_agree(way(given, temperature, chunk_size=chunk), full_softmax(given, temperature))


@pytest.mark.parametrize("block", [1, 500, 2000])
@pytest.mark.parametrize("way", WAYS)
def test_arithmetic_in_blocks_of_rows_changes_nothing(way, block, monkeypatch):
    monkeypatch.setattr(logprobs, "BLOCK", block)
    given = head_problem()
    assert_agree(way(given, 0.7, chunk_size=20), full_softmax(given, 0.7))


def test_without_the_entropy_the_log_probabilities_are_the_same():
    given = head_problem() | {"of_entropy": torch.zeros(37)}
    hidden, weight = given["hidden"].clone().requires_grad_(), given["weight"].clone().requires_grad_()
    logprobs, entropy = head_logprobs(hidden, Head(weight, given["targets"], 0.7, chunk_size=10), entropy=False)
    assert entropy is None
    (logprobs @ given["of_logprobs"]).backward()
    found = {"logprobs": logprobs.detach(), "hidden": hidden.grad, "weight": weight.grad}
    expected = full_softmax(given, 0.7)
    assert_agree(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("alone", ["of_logprobs", "of_entropy"])
def test_each_result_has_its_own_gradient(alone):
    given = head_problem(seed=1)
    for name in {"of_logprobs", "of_entropy"} - {alone}:
        given[name] = torch.zeros_like(given[name])
    assert_agree(plain_head(given, 0.7, chunk_size=10), full_softmax(given, 0.7))


def test_large_logits_do_not_overflow():
    given = head_problem()
    given["hidden"] = given["hidden"] * 300
    result, expected = plain_head(given, 1.0, chunk_size=10), full_softmax(given, 1.0)
    assert expected["logprobs"].min() < -500
    for name in ("logprobs", "entropy", "hidden"):
        torch.testing.assert_close(result[name].double(), expected[name], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("way", WAYS)
def test_no_tokens_give_no_results_and_zero_gradients(way):
    result = way(head_problem(count=0), 1.0)
    assert result["logprobs"].shape == result["entropy"].shape == (0,)
    assert result["logprobs"].dtype == torch.float32
    assert result["hidden"].shape == (0, 16)
    assert torch.equal(result["weight"], torch.zeros(48, 16))


class Watch(TorchDispatchMode):
    """Notes the shape of every tensor that is computed inside."""

    def __enter__(self):
        self.shapes = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.shapes += [result.shape] if isinstance(result, torch.Tensor) else []
        return result


@pytest.mark.parametrize("way", WAYS)
def test_the_logits_of_all_tokens_are_never_held_at_once(way):
    with Watch() as watch:
        way(head_problem(count=200, vocab=500), 1.0, chunk_size=10)
    assert (
        max(shape.numel() for shape in watch.shapes) < 2 * 500 * 16
    )  # the head itself; 200 tokens' logits would be 100000


@pytest.mark.parametrize("inside", [False, True])
def test_a_frozen_head_gets_no_gradient_and_none_is_computed(inside):
    given = head_problem()
    hidden, head = given["hidden"].clone().requires_grad_(), Head(given["weight"].detach(), given["targets"], 0.7)

    def loss(logprobs, entropy, chunk):
        return logprobs @ given["of_logprobs"][chunk] + entropy @ given["of_entropy"][chunk]

    with Watch() as watch:
        total = head_loss(hidden, head, loss) if inside else loss(*head_logprobs(hidden, head), slice(None))
        total.backward()
    assert_agree({"hidden": hidden.grad}, {"hidden": full_softmax(given, 0.7)["hidden"]})
    assert given["weight"].shape not in watch.shapes


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", ["plain", "loss inside"])
def test_a_head_cut_over_processes_answers_as_the_whole_one(size, way, four_processes):
    expected = full_softmax(head_problem(), 0.7)
    for rank, results in enumerate(four_processes["heads"]):
        result = dict(results[size, way])
        count = 48 // size
        assert result.pop("first") == rank % size * count
        own = slice(rank % size * count, (rank % size + 1) * count)
        assert_agree(result, expected | {"weight": expected["weight"][own]})
        # Ranks that disagree in the last bit would drift apart.
        for name in ("logprobs", "entropy", "hidden"):
            assert torch.equal(result[name], four_processes["heads"][rank // size * size][size, way][name]), name
