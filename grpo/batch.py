"""The batch that every role reads and writes: a TensorDict with one row a sample and jagged token fields.

| field | shape, dtype | meaning |
|---|---|---|
| tokens | [B, *] int64 | prompt and response, exactly the ids the engine saw and sampled |
| response_mask | [B, *] bool | True where the policy sampled the token, the end-of-sequence token included |
| rollout_logprobs | [B, *] float32 | what the engine reported when it sampled, 0 elsewhere |
| old_logprobs, ref_logprobs | [B, *] float32 | the trainer's own, 0 outside the mask |
| advantages | [B, *] float32 | per token, 0 outside the mask |
| weights | [B, *] float32 | what a token's loss counts in that of its minibatch, 0 outside the mask |
| group | [B] int64 | which prompt of the step this is a response to |
| truncated | [B] bool | the response was cut at its longest length |
| version | [B] int64 | the version of the weights it was sampled from |
| rewards, rewards/NAME | [B] float32 | the total, and its parts |
| example | [B] non-tensor | the dataset row: what rewards are given |

Position t of a logprob field is log p(tokens[t] | tokens[<t]) at the sampling temperature.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict


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


def make_batch(fields: dict[str, torch.Tensor], examples: Sequence[Any] | None = None) -> TensorDict:
    """The TensorDict of `fields`, each [B] or [B, *], and of the dataset rows where there are any."""
    size = next(iter(fields.values())).shape[0]
    batch = TensorDict(dict(fields), batch_size=[size])
    if examples is not None:
        batch["example"] = NonTensorStack(*examples)
    return batch


def examples_of(batch: TensorDict) -> list[Any]:
    """The dataset rows of a batch, one a sample."""
    return batch.get("example").tolist()


def select(batch: TensorDict, rows: Sequence[int]) -> TensorDict:
    """The given rows of a batch in the given order; rows may repeat."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    fields = {}
    for name, field in batch.items():
        if name == "example":
            continue
        if field.is_nested:
            parts = field.unbind()
            fields[name] = jagged([parts[row] for row in rows])
        else:
            fields[name] = field[index]
    if "example" not in batch:
        return make_batch(fields)
    examples = examples_of(batch)
    return make_batch(fields, [examples[row] for row in rows])


def concatenate(batches: Sequence[TensorDict]) -> TensorDict:
    """The rows of all batches, one after the other; the batches have the same fields and no `example`."""
    fields = {}
    for name, field in batches[0].items():
        if field.is_nested:
            fields[name] = jagged([row for batch in batches for row in batch[name].unbind()])
        else:
            fields[name] = torch.cat([batch[name] for batch in batches])
    return make_batch(fields)
