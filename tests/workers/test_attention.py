"""Packed attention: every sequence is computed as if it stood alone."""

import itertools
import math

import pytest
import torch

from workers.microbatch import MicroBatch
from workers.parallel.attention import PackedSequences, packed_attention
from workers.parallel.policy import load_policy

LENGTHS, CPU = [7, 1, 12, 4, 2], torch.device("cpu")
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def policy(layout, model_config):
    return load_policy(model_config, layout, trains=False)


@pytest.fixture
def sequences():
    random = torch.Generator().manual_seed(0)
    return [torch.randint(2, 117, (length,), generator=random) for length in LENGTHS]


def micro_batch(sequences, mask=None):
    """The sequences in one pass, with all but their first tokens as responses where no mask [T] is given."""
    lengths = [len(tokens) for tokens in sequences]
    mask = torch.cat([torch.arange(length) > 0 for length in lengths]) if mask is None else mask
    fields = {"tokens": torch.cat(sequences), "response_mask": mask}
    return MicroBatch.of(fields, lengths, CPU, list(range(len(lengths))))


def logprobs_of(policy, sequences):
    """log-probabilities and entropies of every token but the first, one tensor a sequence."""
    micro = micro_batch(sequences)
    with torch.no_grad():
        answers = torch.stack(policy(micro, TEMPERATURE))
    everywhere = torch.zeros(2, len(micro.tokens)).index_copy(1, micro.predictors + 1, answers)
    return list(everywhere.split(micro.lengths, dim=1))


def attention_by_hand(query, key, value, scaling):
    """Causal attention of one sequence in loops: [T, heads, d] and [T, KV heads, d] in, [T, heads, d] out."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for t, head in itertools.product(*map(range, query.shape[:2])):
        shared = head * key.shape[1] // query.shape[1]
        scores = [math.exp(scaling * float(query[t, head] @ key[s, shared])) for s in range(t + 1)]
        for s in range(t + 1):
            out[t, head] += scores[s] / sum(scores) * value[s, shared]
    return out


def projections(heads, kv_heads):
    random = torch.Generator().manual_seed(1)
    shapes = [(sum(LENGTHS), count, 6) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]


def attend(query, key, value):
    return packed_attention(query, key, value, 0.3, PackedSequences.of(LENGTHS, CPU))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_attention_is_causal_within_each_sequence_and_shares_grouped_keys(heads, kv_heads):
    query, key, value = projections(heads, kv_heads)
    pieces = zip(*(x.detach().split(LENGTHS) for x in (query, key, value)), strict=True)
    expected = torch.cat([attention_by_hand(*piece, 0.3) for piece in pieces])
    torch.testing.assert_close(attend(query, key, value).detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("which", range(len(LENGTHS)))
def test_no_gradient_crosses_a_border(which):
    given = projections(4, 2)
    attend(*given).split(LENGTHS)[which].square().sum().backward()
    for x in given:
        for i, piece in enumerate(x.grad.split(LENGTHS)):
            assert bool(piece.any()) == (i == which) or (LENGTHS[which] == 1 and i == which)


def test_positions_begin_anew_in_each_sequence():
    sequences = PackedSequences.of([3, 1, 2], CPU)
    assert sequences.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert (sequences.cu_seqlens.tolist(), sequences.cu_seqlens.dtype) == ([0, 3, 4, 6], torch.int32)
    assert sequences.max_seqlen == 3


def test_packed_sequences_have_the_logprobs_of_transformers(policy, hf_model, sequences):
    for tokens, (logprobs, entropy) in zip(sequences, logprobs_of(policy, sequences), strict=True):
        with torch.no_grad():
            logp = (hf_model(tokens[None]).logits[0, :-1].double() / TEMPERATURE).log_softmax(-1)
        torch.testing.assert_close(logprobs[1:].double(), logp.gather(1, tokens[1:, None])[:, 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy[1:].double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)
        assert logprobs[0] == entropy[0] == 0


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_the_order_of_packing_does_not_matter(policy, sequences, order):
    ordered = [sequences[i] for i in order]
    alone = [logprobs_of(policy, [tokens])[0] for tokens in ordered]
    torch.testing.assert_close(logprobs_of(policy, ordered), alone, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_changing_one_sequence_leaves_the_others_as_they_were(policy, sequences, changed):
    before = logprobs_of(policy, sequences)
    sequences[changed] = (sequences[changed] + 31) % 115 + 2
    after = logprobs_of(policy, sequences)
    for i in range(len(LENGTHS)):
        if i != changed:
            torch.testing.assert_close(after[i], before[i], rtol=0, atol=1e-6)
        elif LENGTHS[i] > 1:
            assert (after[i] - before[i]).abs().max() > 1e-2


def test_a_later_token_does_not_change_an_earlier_one(policy, sequences):
    before = logprobs_of(policy, sequences)
    sequences[2][8] = sequences[2][8] % 100 + 3
    after = logprobs_of(policy, sequences)
    torch.testing.assert_close(after[2][:, :8], before[2][:, :8], rtol=0, atol=1e-6)
    assert (after[2][:, 9:] - before[2][:, 9:]).abs().min() > 0


def test_answers_are_given_for_the_tokens_of_responses(policy, sequences):
    full = torch.cat(logprobs_of(policy, sequences), dim=1)
    random = torch.Generator().manual_seed(2)
    for mask in (torch.rand(sum(LENGTHS), generator=random) < 0.4, torch.zeros(sum(LENGTHS), dtype=torch.bool)):
        mask[PackedSequences.of(LENGTHS, mask.device).cu_seqlens[:-1].long()] = False
        with torch.no_grad():
            answers = torch.stack(policy(micro_batch(sequences, mask), TEMPERATURE))
        torch.testing.assert_close(answers, full[:, mask], rtol=1e-6, atol=1e-6)
