"""The ActorWorker: holds the trained policy and its optimizer, computes log-probabilities, takes update steps."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict

from grpo.advantages import weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, make_batch, select
from grpo.config import ConfigError, choose, option
from grpo.losses import imitation_loss, policy_loss
from workers.dispatch import Worker, WorkerGroup, dispatched
from workers.microbatch import MicroBatch, microbatches
from workers.offload import HostOffload
from workers.parallel.flops import Flops, peak_of
from workers.parallel.lora import LoraConfig
from workers.parallel.mesh import TrainingLayout
from workers.parallel.policy import ModelConfig, Policy, load_policy, read_config

SCHEDULES = ("constant", "linear", "cosine")
OFFLOADS = ("optimizer", "parameters", "reference")
RECOMPUTES = ("none", "selective", "full")


@dataclass
class ActorConfig:
    tensor_parallel: int = option(1, "Processes that share every layer's matrices.")
    replicate: int = option(1, "Copies of the sharded model (hybrid sharding); 1 shards over all processes.")
    max_tokens_per_microbatch: int = option(16384, "Most tokens in one forward and backward pass of one process.")
    learning_rate: float = option(1e-6, "Highest learning rate of AdamW.")
    betas: list[float] = option([0.9, 0.95], "AdamW's decay rates of the mean and the squared mean.")
    weight_decay: float = option(0.0, "AdamW's weight decay of matrices; norms and biases have none.")
    warmup_updates: int = option(0, "Optimizer updates over which the learning rate rises from 0.")
    schedule: str = option("constant", "Learning rate after the warm-up: constant, linear or cosine.")
    final_learning_rate: float = option(0.0, "Where the linear and cosine schedules end, as a share of the highest.")
    max_grad_norm: float = option(1.0, "Longest gradient; a longer one is scaled down to it.")
    compile: bool | None = option(
        None, "Compile each layer with torch.compile and the head with Triton; where it is not said, on CUDA alone."
    )
    recompute: str = option(
        "none",
        "Layers that are computed again in the backward pass instead of keeping their activations: none, selective "
        "(every other) or full.",
    )
    reshard: bool | None = option(
        None,
        "Free a layer's gathered weights after each use instead of keeping them until the update is done; where it is "
        "not said, if they are sharded over several processes, or frozen beside adapters.",
    )
    offload: list[str] = option(
        [],
        "What waits in the host's memory while the engine serves: optimizer, parameters, reference (also while the "
        "actor learns). Gradients are freed always.",
    )
    lora: LoraConfig = option(LoraConfig, "")

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot work."""
        choose(self.schedule, SCHEDULES, "actor.schedule")
        choose(self.recompute, RECOMPUTES, "actor.recompute")
        for what in self.offload:
            choose(what, OFFLOADS, "actor.offload")
        for name in ("tensor_parallel", "replicate", "max_tokens_per_microbatch", "learning_rate", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"actor.{name}={getattr(self, name)} must be above 0.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"actor.betas={self.betas} must be two numbers of at least 0 and below 1.")
        self.lora.check(self.tensor_parallel)

    def fuses(self, device: torch.device) -> bool:
        """Whether layers are compiled for `device`."""
        return device.type == "cuda" if self.compile is None else self.compile

    def reshards(self, shards: int) -> bool:
        """Whether a layer's weights, gathered from `shards` processes, are freed after each use.

        One shard gathers from none: what it would free and make again are its own weights in the compute type.
        """
        return shards > 1 or self.lora.rank > 0 if self.reshard is None else self.reshard


def learning_rate(config: ActorConfig, update: int, total_updates: int) -> float:
    """The learning rate of update 0, 1, ...: a linear warm-up, then the schedule, at its end after the last update."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (update - config.warmup_updates) / max(1, total_updates - config.warmup_updates))
    if config.schedule == "cosine":
        progress = 0.5 - 0.5 * float(torch.cos(torch.tensor(torch.pi * progress, dtype=torch.double)))
    return config.learning_rate * (1 - (1 - config.final_learning_rate) * progress)


class ActorWorker(Worker):
    """The policy in training. `version` counts the steps whose samples it has learned from."""

    def __init__(
        self,
        model: ModelConfig,
        config: ActorConfig,
        algorithm: AlgorithmConfig,
        layout: TrainingLayout,
        temperature: float,
        total_updates: int,
    ) -> None:
        self.flops = Flops.of(read_config(model))
        super().__init__(layout, self.flops.cost)
        self.config, self.algorithm, self.temperature = config, algorithm, temperature
        self.total_updates = total_updates
        self.reshards = config.reshards(layout.dp_shard)
        self.policy = load_policy(
            model,
            layout,
            fuse=config.fuses(layout.device),
            recompute=config.recompute,
            reshard=self.reshards,
            lora=config.lora,
        )
        self.parameters = list(self.policy.parameters())
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [parameter for parameter in trained if parameter.ndim > 1]},
                # Norms and biases: to pull them to 0 would change what a layer does, not how large its weights are.
                {"params": [parameter for parameter in trained if parameter.ndim == 1], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=tuple(config.betas),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.updates = 0
        self.version = 0
        self.optimizer_offload, self.parameters_offload = HostOffload(layout.device), HostOffload(layout.device)
        self.peak = peak_of(torch.cuda.get_device_name()) if layout.device.type == "cuda" else None

    def offload_optimizer(self) -> None:
        """Move AdamW's state into the host's memory, where actor.offload says so."""
        if "optimizer" in self.config.offload:
            states = (state for held in self.optimizer.state.values() for state in held.values() if state.ndim)
            self.optimizer_offload.offload(states)

    def offload_parameters(self) -> None:
        """Move the master weights into the host's memory, where actor.offload says so."""
        if "parameters" in self.config.offload:
            self.parameters_offload.offload(self.parameters)

    def reload(self) -> None:
        """Bring back what was offloaded; AdamW's state comes while forward and backward passes run."""
        self.parameters_offload.reload()
        self.parameters_offload.wait()
        self.optimizer_offload.reload()

    @dispatched("tokens", "response_mask")
    def compute_logprobs(self, batch: TensorDict, name: str = "old_logprobs") -> TensorDict:
        """The policy's own log-probabilities of the sampled tokens, as a batch with the one field `name` [B, *]."""
        most = self.config.max_tokens_per_microbatch
        return compute_logprobs(self.policy, self.group, batch, name, most, self.temperature)

    def update(self, batch: TensorDict | None) -> dict[str, float]:
        """Learn from one step's samples: epochs_per_step passes in minibatches_per_step optimizer updates each.

        The minibatches are whole groups, in an order that depends on the version alone, so that they are the same
        on every layout and after a resume. Returns the means over the updates (maxima for metrics named max).
        """
        collected: dict[str, list[float]] = {}
        for epoch in range(self.algorithm.epochs_per_step):
            for minibatch in self._minibatches(batch, epoch):
                weighted = weigh_tokens(minibatch, self.algorithm)
                for name, value in self.update_minibatch(weighted).items():
                    collected.setdefault(name, []).append(value)
        self.version += 1
        return {n: max(v) if n.endswith("max") else sum(v) / len(v) for n, v in collected.items()}

    def _minibatches(self, batch: TensorDict | None, epoch: int) -> Iterator[TensorDict | None]:
        count = self.algorithm.minibatches_per_step
        if batch is None or count == 1:
            yield from [batch] * count
            return
        groups = batch["group"].unique()
        generator = torch.Generator().manual_seed(self.version * 1000 + epoch)
        shuffled = groups[torch.randperm(len(groups), generator=generator)]
        for chunk in shuffled.tensor_split(count):
            yield select(batch, torch.isin(batch["group"], chunk).nonzero()[:, 0].tolist())

    @dispatched("tokens", "response_mask", "advantages", "weights", "rollout_logprobs", "old_logprobs", "ref_logprobs")
    def update_minibatch(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer update with the loss of a minibatch; its metrics, the same on every rank."""

        def loss(logprobs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, torch.Tensor]):
            total, sums = policy_loss(logprobs, entropy, fields, self.algorithm)
            ours = fields["old_logprobs"] if "old_logprobs" in fields else logprobs.detach()
            gap = fields["rollout_logprobs"] - ours
            # Over samples of the rollout policy the mean of the gap itself estimates KL(rollout || trainer).
            sums |= {"rollout/logprob_gap": gap.abs().sum(), "rollout/kl": gap.sum()}
            sums["rollout/logprob_gap_max"] = gap.abs().max() if len(gap) else gap.new_zeros(())
            moments = {"gap2": gap.square(), "ours": ours, "ours2": ours.square(), "both": gap * ours}
            return total, sums | {name: values.sum() for name, values in moments.items()}

        metrics = self._step(batch, loss, self.algorithm.sees_whole_responses)
        gap2, ours, ours2, both = (metrics.pop(name) for name in ("gap2", "ours", "ours2", "both"))
        covariance = both - metrics["rollout/kl"] * ours
        spread, gap_spread = max(ours2 - ours**2, 1e-12), max(gap2 - metrics["rollout/kl"] ** 2, 1e-12)
        # Another temperature stretches log-probabilities: the gap then follows them, which nothing else makes it do.
        metrics["rollout/gap_correlation"] = covariance / (spread * gap_spread) ** 0.5
        metrics["rollout/gap_slope"] = covariance / spread
        return metrics

    @dispatched("tokens", "response_mask", "weights")
    def imitate(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer update towards the masked tokens of a batch (supervised training); its metrics."""
        return self._step(batch, lambda logprobs, entropy, fields: (imitation_loss(logprobs, fields["weights"]), {}))

    def _step(self, batch: TensorDict, loss: Callable, whole_responses: bool = False) -> dict[str, float]:
        begun = time.perf_counter()
        tokens = batch["response_mask"].values().sum().double()
        dist.all_reduce(tokens, group=self.layout.sum_group)
        if not tokens:
            raise ValueError("The minibatch has no response tokens: nothing can be learned from it.")
        sums: dict[str, torch.Tensor] = {}
        micros: list[MicroBatch] = []
        # Each is put together while the device works on the one before.
        for micro in microbatches(batch, self.config.max_tokens_per_microbatch, self.group):
            micros.append(micro)
            self.policy.expect_backward(reduce=micro.last, reshard=micro.last or self.reshards)

            def part(logprobs: torch.Tensor, entropy: torch.Tensor, here: slice, micro: MicroBatch = micro):
                total, parts = loss(logprobs, entropy, {name: field[here] for name, field in micro.fields.items()})
                for name, value in {**parts, "loss": total.detach()}.items():
                    merge = torch.maximum if name.endswith("max") else torch.add
                    sums[name] = merge(sums[name], value) if name in sums else value
                return total

            seen = (micro.tokens, micro.lengths, micro.wanted, self.temperature)
            total = part(*self.policy(*seen), slice(None)) if whole_responses else self.policy(*seen, loss=part)
            # FSDP averages gradients over the parts; the weights are those in the whole minibatch, so a sum is wanted.
            (total * self.layout.sum_size).backward()
        norm = clip_gradients(self.parameters, self.config.max_grad_norm, self.layout)
        rate = learning_rate(self.config, self.updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer_offload.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        work, metrics = self._work(micros)  # while the device finishes: what follows waits for it
        metrics |= self._reduce(sums, float(tokens))
        metrics |= {"grad_norm": float(norm), "learning_rate": rate, "tokens/response": float(tokens)}
        speed = work / (time.perf_counter() - begun) / dist.get_world_size()
        metrics["perf/update_tflops_per_device"] = speed / 1e12
        if self.peak:
            metrics["perf/update_mfu"] = speed / self.peak
        return metrics

    def _work(self, micros: list[MicroBatch]) -> tuple[float, dict[str, float]]:
        """The operations of an update on all ranks, and how evenly they lie (docs/performance.md has the formulas)."""
        # Backward costs twice the forward pass: the gradients to what comes in, and (but for adapters) to the weights.
        passes = 2 if self.config.lora.rank else 3
        each = [
            passes * float(self.flops.forward(micro.lengths, len(micro.wanted))) if micro.rows else 0.0
            for micro in micros
        ]
        tokens = [sum(micro.lengths) for micro in micros if micro.rows]
        most = torch.tensor([sum(each), *each], dtype=torch.double)
        sums = torch.tensor([sum(each), sum(tokens) - min(tokens), len(tokens) - 1], dtype=torch.double)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.layout.sum_group)
        dist.all_reduce(sums, group=self.layout.sum_group)
        work, full, count = sums.tolist()
        metrics = {
            "perf/update_balance": work / self.layout.sum_size / float(most[0]),
            # Ranks meet in every layer, so each micro-batch lasts as long as its largest.
            "perf/update_bubble": 1 - work / self.layout.sum_size / float(most[1:].sum()),
        }
        if count:
            metrics["perf/packing"] = full / count / self.config.max_tokens_per_microbatch
        return work, metrics

    def _reduce(self, sums: dict[str, torch.Tensor], tokens: float) -> dict[str, float]:
        found, values = [], []
        for op, over in ((dist.ReduceOp.SUM, tokens), (dist.ReduceOp.MAX, 1.0)):
            names = [name for name in sums if name.endswith("max") == (op == dist.ReduceOp.MAX)]
            if names:
                reduced = torch.stack([sums[name].double() for name in names])
                dist.all_reduce(reduced, op=op, group=self.layout.sum_group)
                found += names
                values.append(reduced / over)
        # Read at once, and last: to read them makes the host wait for the device.
        metrics = dict(zip(found, torch.cat(values).tolist(), strict=True))
        metrics["loss"] *= tokens  # its weights are its denominator
        return metrics


def compute_logprobs(
    policy: Policy, group: WorkerGroup, batch: TensorDict, name: str, max_tokens: int, temperature: float
) -> TensorDict:
    """Log-probabilities of the masked tokens of this part's rows under `policy`, as the one field `name` [B, *]."""
    seen: list[tuple[MicroBatch, torch.Tensor]] = []
    with torch.no_grad():
        for micro in microbatches(batch, max_tokens, group):
            logprobs, _ = policy(micro.tokens, micro.lengths, micro.wanted, temperature, entropy=False)
            seen.append((micro, logprobs))
    # Without a backward pass parameters would stay gathered, in the compute type, where others read them.
    policy.reshard_all()
    rows: dict[int, torch.Tensor] = {}
    for micro, logprobs in seen:  # read at the end: between two passes the device would wait for the host
        everywhere = torch.zeros(len(micro.tokens)).index_copy(0, micro.wanted.cpu(), logprobs.cpu())
        rows.update(zip(micro.rows, everywhere.split(micro.lengths), strict=False))
    return make_batch({name: jagged([rows[i] for i in range(len(batch))])})


@torch.no_grad()
def clip_gradients(parameters: list[torch.nn.Parameter], longest: float, layout: TrainingLayout) -> torch.Tensor:
    """Scale the gradients down to the norm `longest` where they are longer; returns their norm before, a scalar.

    It is the norm of the whole gradient on every layout: what is replicated over the tensor mesh counts once.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    locals_ = [grad.to_local() for grad in grads]
    on_tensor_mesh = layout.tp_size > 1
    copies = [
        float(layout.dp_replicate * (layout.tp_size if on_tensor_mesh and grad.placements[-1].is_replicate() else 1))
        for grad in grads
    ]
    # Scalars go along with the kernels: a tensor of them would make the device wait.
    squares = torch._foreach_div(torch._foreach_pow(torch._foreach_norm(locals_), 2.0), copies)
    total = torch.stack(squares).double().sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_(locals_, (longest / (norm + 1e-6)).clamp(max=1.0).to(locals_[0].dtype))
    return norm
