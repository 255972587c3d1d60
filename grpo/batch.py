"""A sample, and the batch that every role reads and writes: a TensorDict of one row a sample, token fields jagged.

| field | shape, dtype | meaning |
|---|---|---|
| tokens | [B, *] int64 | what the engine saw and sampled, exactly |
| response_mask | [B, *] bool | True where the policy sampled the token, the end-of-sequence token included |
| rollout_logprobs | [B, *] float32 | what the engine reported when it sampled, 0 elsewhere |
| versions | [B, *] int64 | the version of the weights that a token was sampled from, -1 elsewhere |
| old_logprobs, ref_logprobs | [B, *] float32 | the trainer's own, 0 outside the mask |
| teacher_logprobs | [B, *] float32 | a teacher's, 0 outside the mask |
| advantages | [B, *] float32 | per token, 0 outside the mask |
| loss_weights | [B, *] float32 | what a token's loss counts in that of its minibatch, 0 outside the mask |
| group | [B] int64 | which prompt of the step this is a response to |
| held_out | [B] bool | sampled to evaluate, not to train |
| truncated | [B] bool | the response was cut at its longest length |
| failures | [B] int64 | how many components of the reward could not be graded, or 1 where none applies |
| penalties | [B] float32 | what is added to the reward for length, at most 0 |
| rewards, rewards/NAME | [B] float32 | the total, and its components, NaN where one does not apply |

Position t of a logprob field is log p(tokens[t] | tokens[<t]) at the sampling temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict


@dataclass
class Trajectory:
    """The T tokens that the policy saw and sampled, exactly: none is ever decoded and tokenised again."""

    tokens: np.ndarray  # [T] int64
    group: int = 0  # which prompt of the step it answers
    held_out: bool = False
    info: dict[str, Any] = field(default_factory=dict)  # the dataset's row: what rewards are given
    prompt: str = ""
    mask: np.ndarray = None  # [T] bool, True where the policy sampled the token
    logprobs: np.ndarray = None  # [T] float32, what the engine reported, 0 where the mask is not
    versions: np.ndarray = None  # [T] int64, of the weights that the token was sampled from, -1 where the mask is not
    finish_reason: str = "stop"  # "length": cut at the longest length; "abort": the engine was told to end it
    response: str = ""  # what the policy sampled as text, without the stop token it ended with
    reward: float = 0.0
    components: dict[str, float | None] = field(default_factory=dict)  # before their weights, None: does not apply
    failures: list[Any] = field(default_factory=list)  # the components that could not be graded, and why

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.tokens, np.int64)
        self.mask = np.zeros(len(self.tokens), bool)
        self.logprobs = np.zeros(len(self.tokens), np.float32)
        self.versions = np.full(len(self.tokens), -1)

    def add_sampled(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Go on with tokens that the policy sampled from weights of `version`."""
        self.tokens = np.append(self.tokens, np.fromiter(tokens, np.int64, len(tokens)))
        self.mask = np.append(self.mask, np.ones(len(tokens), bool))
        self.logprobs = np.append(self.logprobs, np.fromiter(logprobs, np.float32, len(tokens)))
        self.versions = np.append(self.versions, np.full(len(tokens), version))


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, *] jagged nested tensor of rows with shapes [length_b]."""
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(rows)), offsets)


def with_values(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A jagged tensor with the row lengths of `like` [B, *] and the flat `values` [sum of lengths]."""
    return torch.nested.nested_tensor_from_jagged(values, like.offsets())


def lengths_of(field: torch.Tensor) -> list[int]:
    """The row lengths of a jagged tensor [B, *]."""
    return field.offsets().diff().tolist()


def make_batch(fields: dict[str, torch.Tensor]) -> TensorDict:
    """The TensorDict of `fields`, each [B] or [B, *]."""
    return TensorDict(fields, batch_size=[next(iter(fields.values())).shape[0]])


def select(batch: TensorDict, rows: Sequence[int]) -> TensorDict:
    """The given rows of a batch in the given order; rows may repeat."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    fields = {}
    for name, column in batch.items():
        if column.is_nested:
            parts = column.unbind()
            fields[name] = jagged([parts[row] for row in rows])
        else:
            fields[name] = column[index]
    return make_batch(fields)


def concatenate(batches: Sequence[TensorDict]) -> TensorDict:
    """The rows of all batches, one after the other; the batches have the same fields."""
    fields = {}
    for name, column in batches[0].items():
        if column.is_nested:
            fields[name] = jagged([row for batch in batches for row in batch[name].unbind()])
        else:
            fields[name] = torch.cat([batch[name] for batch in batches])
    return make_batch(fields)


def batch_of(trajectories: Sequence[Trajectory]) -> TensorDict:
    """The trajectories as a batch, one row each: from tokens to rewards and their components."""
    offsets = torch.tensor([0, *(len(t.tokens) for t in trajectories)]).cumsum(0)

    def stream(name: str) -> torch.Tensor:
        values = torch.from_numpy(np.concatenate([getattr(t, name) for t in trajectories]))
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    fields = {
        "tokens": stream("tokens"),
        "response_mask": stream("mask"),
        "rollout_logprobs": stream("logprobs"),
        "versions": stream("versions"),
        "group": torch.tensor([t.group for t in trajectories]),
        "held_out": torch.tensor([t.held_out for t in trajectories]),
        "truncated": torch.tensor([t.finish_reason == "length" for t in trajectories]),
        "failures": torch.tensor([len(t.failures) for t in trajectories]),
        "rewards": torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
    }
    for name in trajectories[0].components:
        values = (t.components[name] for t in trajectories)
        values = [torch.nan if value is None else value for value in values]
        fields[f"rewards/{name}"] = torch.tensor(values, dtype=torch.float32)
    return make_batch(fields)
