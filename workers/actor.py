"""The ActorWorker: the policy in training. It computes log-probabilities and takes optimizer updates."""

import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from grpo.advantages import weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, make_batch, select
from grpo.config import ConfigError
from grpo.losses import gap_metrics, policy_loss, sft_loss
from grpo.metrics import Count, Max, Mean, Metric, Sum, flat, merge, over_updates, read
from workers.config import ActorConfig, ModelConfig
from workers.dispatch import Worker, WorkerGroup, dispatched
from workers.microbatch import MicroBatch, microbatches
from workers.models import family_of
from workers.models.hub import read_config
from workers.offload import HostOffload
from workers.optimizer import clip_gradients, learning_rate, make_optimizer
from workers.parallel.mesh import TrainingLayout, peak_of
from workers.parallel.policy import Policy, load_policy

LARGEST = 1e6
"""No weight of a model is so large, and products of a few such leave the range of its numbers in a forward pass."""

TokenLoss = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Metric]]]
"""From log-probabilities, entropies and fields of response tokens, [N] each: their loss and metrics."""


class ActorWorker(Worker):
    """The policy in training. `version` counts the steps whose samples it has learned from, `updates` their updates.

    A step's samples are learned from in `epochs` passes of `minibatches` updates each. total_updates: of the run, for
    the learning rate's schedule.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ActorConfig,
        algorithm: AlgorithmConfig,
        layout: TrainingLayout,
        temperature: float,
        total_updates: int,
        minibatches: int = 1,
        epochs: int = 1,
    ) -> None:
        self.flops = family_of(read_config(model)).flops()
        super().__init__(layout, self.flops.cost)
        self.config, self.algorithm, self.temperature = config, algorithm, temperature
        self.total_updates, self.minibatches, self.epochs = total_updates, minibatches, epochs
        compiled, self.reshards = config.compiles(layout.device), config.reshards(layout.dp_shard)
        computed = {"compiled": compiled, "recompute": config.recompute, "reshard": self.reshards}
        self.policy = load_policy(model, layout, lora=config.lora, **computed)
        self.parameters = list(self.policy.parameters())
        self.optimizer = make_optimizer(self.parameters, config)
        self.updates = self.version = 0
        self.optimizer_offload, self.parameters_offload = HostOffload(layout.device), HostOffload(layout.device)
        self.peak = peak_of(torch.cuda.get_device_name()) if layout.device.type == "cuda" else None

    def offload_optimizer(self) -> None:
        """Move AdamW's state into the host's memory, if actor.offload says so."""
        if "optimizer" in self.config.offload:
            states = (state for held in self.optimizer.state.values() for state in held.values() if state.ndim)
            self.optimizer_offload.offload(states)

    def offload_parameters(self) -> None:
        """Move the master weights into the host's memory, if actor.offload says so."""
        if "parameters" in self.config.offload:
            self.parameters_offload.offload(self.parameters)

    def reload(self) -> None:
        """Bring back what was offloaded; AdamW's state comes while forward and backward passes run."""
        self.parameters_offload.reload()
        self.parameters_offload.wait()
        self.optimizer_offload.reload()

    @dispatched("tokens", "response_mask")
    def compute_logprobs(self, batch: TensorDict) -> TensorDict:
        """The controller's batch with the field old_logprobs [B, *] float32, the policy's own; None elsewhere."""
        most = self.config.max_tokens_per_microbatch
        return make_batch({"old_logprobs": response_logprobs(self.policy, self.group, batch, most, self.temperature)})

    def update(self, batch: TensorDict | None) -> dict[str, float]:
        """Learn from the controller's batch, one step's samples; returns the metrics, the same on every rank.

        The order of the minibatches' groups depends on version and epoch alone, so that it is the same on every layout
        and after a resume.
        """
        updates = [
            self._policy_update(weigh_tokens(minibatch, self.algorithm))
            for epoch in range(self.epochs)
            for minibatch in split_by_groups(batch, self.minibatches, seed=self.version * 1000 + epoch)
        ]
        self.version += 1
        return over_updates(updates)

    def update_minibatch(self, batch: TensorDict | None) -> dict[str, float]:
        """One optimizer update with the loss of a minibatch that has loss_weights; its metrics."""
        return over_updates([self._policy_update(batch)])

    @dispatched("tokens", "response_mask", "loss_weights")
    def sft_update(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer update towards the response tokens of a batch that has loss_weights; its metrics."""
        found = self._one_update(batch, lambda logprobs, _, fields: (sft_loss(logprobs, fields["loss_weights"]), {}))
        return over_updates([found])

    @dispatched(
        "tokens", "response_mask", "advantages", "loss_weights", "rollout_logprobs", "old_logprobs", "ref_logprobs"
    )
    def _policy_update(self, batch: TensorDict) -> dict[str, Metric]:
        def loss(logprobs_N: Tensor, entropy_N: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Metric]]:
            total, metrics = policy_loss(logprobs_N, entropy_N, fields, self.algorithm)
            return total, metrics | (gap_metrics(logprobs_N, fields) if unmoved else {})

        # Later updates of a step find another policy than the one that was sampled from.
        unmoved = "old_logprobs" in batch or self.updates % (self.minibatches * self.epochs) == 0

        return self._one_update(batch, loss, self.algorithm.sees_whole_responses("old_logprobs" in batch))

    def _one_update(self, batch: TensorDict, token_loss: TokenLoss, whole_responses: bool = False) -> dict[str, Metric]:
        """One optimizer update with the sum of `token_loss` over the response tokens of all ranks' rows.

        whole_responses: token_loss must see all tokens of a response at once. An update whose gradient or loss is not
        finite changes nothing but the count of updates.
        """
        begun = time.perf_counter()
        tokens = batch["response_mask"].values().sum().double()
        dist.all_reduce(tokens, group=self.layout.sum_group)
        if not tokens:
            raise ValueError("The minibatch has no response tokens: nothing can be learned from it.")
        metrics: dict[str, Metric] = {}
        micros: list[MicroBatch] = []
        # Each is put together while the device works on the one before.
        for micro in microbatches(batch, self.config.max_tokens_per_microbatch, self.group):
            micros.append(micro)
            self.policy.expect_backward(reduce=micro.last, reshard=micro.last or self.reshards)

            def loss_of(logprobs: Tensor, entropy: Tensor, chunk: slice, micro: MicroBatch = micro):
                fields = {name: field[chunk] for name, field in micro.fields.items()}
                loss, more = token_loss(logprobs, entropy, fields)
                merge(metrics, {**more, "loss": Sum(loss.detach())})
                return loss

            if whole_responses:
                loss = loss_of(*self.policy(micro, self.temperature), slice(None))
            else:
                loss = self.policy(micro, self.temperature, loss=loss_of)
            # FSDP averages gradients over the ranks; loss weights are of the whole minibatch, so their sum is wanted.
            (loss * self.layout.sum_size).backward()
        norm = clip_gradients(self.parameters, self.config.max_grad_norm, self.layout, metrics["loss"].value)
        metrics["grad_norm"] = Max(norm)  # the same on all ranks
        operations, figures = self._work(micros)  # on the host, while the device finishes
        found = self._read(metrics, float(tokens))
        norm = found["grad_norm"].value
        rate = learning_rate(self.config, self.updates, self.total_updates)
        self.optimizer_offload.wait()
        if finite := math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._expect_weights(rate)
        self.optimizer.zero_grad()
        self.updates += 1
        if self.layout.device.type == "cuda":
            torch.cuda.synchronize()  # so that the time below has the optimizer's step in it
        speed = operations / (time.perf_counter() - begun) / dist.get_world_size()
        figures |= {"grad_norm": norm, "learning_rate": rate, "tokens/response": float(tokens)}
        figures["perf/update_tflops_per_device"] = speed / 1e12
        if self.peak:
            figures["perf/update_mfu"] = speed / self.peak
        found |= {name: Mean(value) for name, value in figures.items()}
        return found | {"update/skipped": Count(int(not finite))}

    @torch.no_grad()
    def _expect_weights(self, rate: float) -> None:
        """Raise ConfigError on every rank where the update at the learning `rate` left no weights to go on with."""
        locals_ = [parameter.to_local() for parameter in self.parameters if parameter.requires_grad]
        largest = torch._foreach_norm([local for local in locals_ if local.numel()], math.inf)
        lost = (~(torch.stack(largest) <= LARGEST).all()).double()  # any comparison with NaN is false
        dist.all_reduce(lost)
        if lost:
            raise ConfigError(
                f"The update at the learning rate {rate:g} made weights that are beyond {LARGEST:g} or no number: the "
                "policy is lost. Lower actor.learning_rate or raise actor.warmup_updates, and begin again or go on "
                "from a checkpoint."
            )

    def _read(self, metrics: dict[str, Metric], tokens: float) -> dict[str, Metric]:
        """The metrics over all ranks, as floats: the one wait for the device before the step."""
        added, largest = flat(metrics, largest=False), flat(metrics, largest=True)
        dist.all_reduce(added, group=self.layout.sum_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.layout.sum_group)
        numbers = torch.cat([added, largest]).tolist()
        return read(metrics, numbers[: len(added)], numbers[len(added) :], tokens)

    def _work(self, micros: list[MicroBatch]) -> tuple[float, dict[str, float]]:
        """The operations of an update on all ranks, and how evenly they lie (docs/performance.md has the formulas)."""
        # Backward costs twice the forward pass: the gradients to what comes in, and (but for adapters) to the weights.
        passes, forward = 2 if self.config.lora.rank else 3, self.flops.forward
        each = [passes * float(forward(m.lengths, len(m.targets))) if m.rows else 0.0 for m in micros]
        tokens = [sum(micro.lengths) for micro in micros if micro.rows]
        most = torch.tensor([sum(each), *each], dtype=torch.double)
        sums = torch.tensor([sum(each), sum(tokens) - min(tokens), len(tokens) - 1], dtype=torch.double)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.layout.sum_group)
        dist.all_reduce(sums, group=self.layout.sum_group)
        operations, full, count = sums.tolist()
        mean = operations / self.layout.sum_size
        # Ranks meet in every layer, so each micro-batch lasts as long as its largest.
        bubble = 1 - mean / float(most[1:].sum())
        figures = {"perf/update_balance": mean / float(most[0]), "perf/update_bubble": bubble}
        if count:
            figures["perf/packing"] = full / count / self.config.max_tokens_per_microbatch
        return operations, figures


def split_by_groups(batch: TensorDict | None, count: int, seed: int) -> Iterator[TensorDict | None]:
    """Split the controller's batch into `count` minibatches of whole groups in a random order; elsewhere all None."""
    if batch is None or count == 1:
        yield from [batch] * count
        return
    groups = batch["group"].unique()
    shuffled = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
    for chunk in shuffled.tensor_split(count):
        yield select(batch, torch.isin(batch["group"], chunk).nonzero()[:, 0].tolist())


def response_logprobs(
    policy: Policy, group: WorkerGroup, batch: TensorDict, max_tokens: int, temperature: float
) -> Tensor:
    """[B, *] float32: log-probabilities of the response tokens of this rank's rows under `policy`, 0 elsewhere."""
    with torch.no_grad():
        micros = microbatches(batch, max_tokens, group)
        seen = [(micro, policy(micro, temperature, entropy=False)[0]) for micro in micros]
    # Without a backward pass parameters would stay gathered, in the compute type, where others read them.
    policy.reshard_all()
    rows: dict[int, Tensor] = {}
    for micro, logprobs in seen:  # read at the end: between two passes the device would wait for the host
        rows |= micro.unpack(logprobs)
    return jagged([rows[i] for i in range(len(batch))])
