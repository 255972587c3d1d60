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
| truncated | [B] bool | a limit cut the response |
| length, response_length | [B] int64 | how many tokens it has, and how many of them the policy sampled |
| oldest_version, newest_version | [B] int64 | of the weights that its tokens were sampled from; -1: it has none |
| failures | [B] int64 | how many components of the reward could not be graded, or 1 where none applies |
| penalties | [B] float32 | what is added to the reward for length, at most 0 |
| rewards, rewards/NAME | [B] float32 | the total, and its components, NaN where one does not apply |
| environment/NAME | [B] float32 | what a conversation came to |

Position t of a logprob field is log p(tokens[t] | tokens[<t]) at the sampling temperature. With several processes the
fields [B, *] of what was sampled stay there, and the controller has the others (workers/dispatch.py); advantages and
loss_weights are [B] then, where all tokens of a response have the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict


class Ending(StrEnum):
    """Why a turn, or a whole sample, ended."""

    STOP = "stop"  # the policy ended it
    LENGTH = "length"  # cut at the longest length
    TURNS = "turns"  # cut after the most turns of a conversation
    DONE = "done"  # the environment ended the conversation
    ERROR = "error"  # so did a failure of the environment
    ABORT = "abort"  # the engine was told to end it


CUT = (Ending.LENGTH, Ending.TURNS)
"""What ended by a limit."""


@dataclass
class Turn:
    """What the policy or its environment said at once."""

    role: str  # as in a chat template: the policy is the assistant
    content: str
    tokens: int = 0
    ending: Ending | None = None  # of a turn of the policy
    calls: int = 0  # of tools


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
    sampled_from: set[int] = field(default_factory=set)  # these versions
    finish_reason: Ending = Ending.STOP
    response: str = ""  # what the policy sampled as text, in a conversation at last, without its stop token
    turns: list[Turn] = field(default_factory=list)  # of a conversation; none of a single answer
    outcome: dict[str, Any] = field(default_factory=dict)  # what rewards are given beside the row
    waited: float = 0.0  # seconds that it waited for its environment
    errors: list[Any] = field(default_factory=list)  # what failed in its environment
    reward: float = 0.0
    components: dict[str, float | None] = field(default_factory=dict)  # before their weights, None: does not apply
    failures: list[Any] = field(default_factory=list)  # the components that could not be graded, and why

    def __post_init__(self) -> None:
        self.begin(self.tokens)

    def begin(self, tokens: Sequence[int]) -> None:
        """Have these tokens as the prompt, and nothing behind it."""
        self.tokens = np.asarray(tokens, np.int64)
        self.mask = np.zeros(len(self.tokens), bool)
        self.logprobs = np.zeros(len(self.tokens), np.float32)
        self.versions = np.full(len(self.tokens), -1)

    def add_sampled(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Go on with tokens that the policy sampled from weights of `version`."""
        if len(tokens):
            self.sampled_from.add(version)
        self._add(tokens, True, np.fromiter(logprobs, np.float32, len(tokens)), version)

    def add_observed(self, tokens: Sequence[int]) -> None:
        """Go on with tokens that an environment said."""
        self._add(tokens, False, np.zeros(len(tokens), np.float32), -1)

    def _add(self, tokens: Sequence[int], sampled: bool, logprobs: np.ndarray, version: int) -> None:
        self.tokens = np.concatenate([self.tokens, np.fromiter(tokens, np.int64, len(tokens))])
        self.mask = np.concatenate([self.mask, np.full(len(tokens), sampled)])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        self.versions = np.concatenate([self.versions, np.full(len(tokens), version)])


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


def response_lengths(batch: TensorDict) -> torch.Tensor:
    """[B] int64: how many tokens of each sample the policy sampled."""
    if "response_length" in batch:
        return batch["response_length"]
    mask = batch["response_mask"]
    return torch.stack([part.sum() for part in mask.values().split(lengths_of(mask))])


def make_batch(fields: dict[str, torch.Tensor]) -> TensorDict:
    """The TensorDict of `fields`, each [B] or [B, *]."""
    return TensorDict(fields, batch_size=[next(iter(fields.values())).shape[0]])


def select(batch: TensorDict, rows: Sequence[int]) -> TensorDict:
    """The given rows of a batch in the given order; rows may repeat."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    fields = {}
    for name, column in batch.items():
        if column.is_nested:
            parts = column.values().split(lengths_of(column))  # unbind of nested tensors is Python, row by row
            fields[name] = jagged([parts[row] for row in rows])
        else:
            fields[name] = column[index]
    return make_batch(fields)


def concatenate(batches: Sequence[TensorDict]) -> TensorDict:
    """The rows of all batches, one after the other; a field [B] that some lack is 0 there."""
    fields, names = {}, dict.fromkeys(name for batch in batches for name in batch.keys())  # noqa: SIM118
    for name in names:
        columns = [batch[name] if name in batch else torch.zeros(len(batch)) for batch in batches]
        if columns[0].is_nested:
            fields[name] = jagged([row for column in columns for row in column.values().split(lengths_of(column))])
        else:
            fields[name] = torch.cat(columns)
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
        "length": torch.tensor([len(t.tokens) for t in trajectories]),
        "response_length": torch.tensor([int(t.mask.sum()) for t in trajectories]),
        "oldest_version": torch.tensor([min(t.sampled_from, default=-1) for t in trajectories]),
        "newest_version": torch.tensor([max(t.sampled_from, default=-1) for t in trajectories]),
        "group": torch.tensor([t.group for t in trajectories]),
        "held_out": torch.tensor([t.held_out for t in trajectories]),
        "truncated": torch.tensor([t.finish_reason in CUT for t in trajectories]),
        "failures": torch.tensor([len(t.failures) for t in trajectories]),
        "rewards": torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
    }
    for name in trajectories[0].components:
        values = (t.components[name] for t in trajectories)
        values = [torch.nan if value is None else value for value in values]
        fields[f"rewards/{name}"] = torch.tensor(values, dtype=torch.float32)
    return make_batch(fields)
