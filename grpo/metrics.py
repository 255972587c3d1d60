"""The metrics of an optimizer update. How one is put together is its type:

| type | over tokens, micro-batches and ranks | over the updates of a step |
|---|---|---|
| Sum | added up (the loss: its denominators are in the tokens' weights) | mean |
| Mean | added up, then divided by the number of response tokens | mean |
| Max | the largest | the largest |
| Line | moments are added up; they become a correlation and a slope | mean of each |
| Count | known for the update as a whole | added up |

A loss function returns them for the tokens it sees, as tensors on the device. `merge` joins those of several pieces,
`flat` makes them ready for the ranks' all-reduce, and `read` makes metrics of floats of the result, on the host.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Metric:
    value: Tensor | float  # a tensor, [] or for Line [5], and once the update is read a float

    join = staticmethod(torch.add)
    over_updates = staticmethod(lambda values: sum(values) / len(values))

    def read(self, name: str, numbers: list[float], tokens: float) -> dict[str, "Metric"]:
        """The metrics of floats that `numbers`, the value over all ranks, become in an update of `tokens` tokens."""
        return {name: type(self)(numbers[0])}


class Sum(Metric): ...


class Mean(Metric):
    """Also what an update has one of, such as its learning rate."""

    def read(self, name: str, numbers: list[float], tokens: float) -> dict[str, Metric]:
        return {name: Mean(numbers[0] / tokens)}


class Max(Metric):
    join = staticmethod(torch.maximum)
    over_updates = staticmethod(max)

    @classmethod
    def of(cls, values_N: Tensor) -> "Max":
        """The largest of `values_N`, which are not negative; 0 where there are none."""
        return cls(values_N.max() if len(values_N) else values_N.new_zeros(()))


class Count(Metric):
    over_updates = staticmethod(sum)


class Line(Metric):
    """How y follows x over tokens: NAME_correlation, and NAME_slope of the line of least squares."""

    @classmethod
    def of(cls, x_N: Tensor, y_N: Tensor) -> "Line":
        return cls(torch.stack([m.sum() for m in (x_N, y_N, x_N.square(), y_N.square(), x_N * y_N)]))

    def read(self, name: str, numbers: list[float], tokens: float) -> dict[str, Metric]:
        x, y, xx, yy, xy = (number / tokens for number in numbers)
        covariance, variance_x, variance_y = xy - x * y, max(xx - x * x, 1e-12), max(yy - y * y, 1e-12)
        correlation = covariance / (variance_x * variance_y) ** 0.5
        return {f"{name}_correlation": Mean(correlation), f"{name}_slope": Mean(covariance / variance_x)}


def merge(metrics: dict[str, Metric], more: dict[str, Metric]) -> None:
    """Put into `metrics` those of another piece of the update."""
    for name, metric in more.items():
        known = metrics.get(name)
        metrics[name] = metric if known is None else type(metric)(metric.join(known.value, metric.value))


def flat(metrics: dict[str, Metric], largest: bool) -> Tensor:
    """[V] float64: the values that are added up over ranks, or those of which the largest is taken."""
    return torch.cat([m.value.double().reshape(-1) for m in metrics.values() if isinstance(m, Max) == largest])


def read(metrics: dict[str, Metric], added: list[float], largest: list[float], tokens: float) -> dict[str, Metric]:
    """The metrics of floats that the two kinds of `flat` values are, reduced over ranks."""
    numbers, found = {False: iter(added), True: iter(largest)}, {}
    for name, metric in metrics.items():
        own = [next(numbers[isinstance(metric, Max)]) for _ in range(metric.value.numel())]
        found |= metric.read(name, own, tokens)
    return found


def over_updates(updates: list[dict[str, Metric]]) -> dict[str, float]:
    """The metrics of a step, from those of its updates."""
    types = {name: type(metric) for update in updates for name, metric in update.items()}
    return {n: kind.over_updates([update[n].value for update in updates if n in update]) for n, kind in types.items()}
