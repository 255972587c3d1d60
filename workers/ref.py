"""The RefWorker: the policy as it was at the start, frozen, for the KL term."""

from tensordict import TensorDict

from workers.actor import ActorConfig, compute_logprobs
from workers.dispatch import Worker, dispatched
from workers.offload import HostOffload
from workers.parallel.flops import Flops
from workers.parallel.lora import adapters_off
from workers.parallel.mesh import TrainingLayout
from workers.parallel.policy import ModelConfig, Policy, load_policy, read_config


class RefWorker(Worker):
    """The reference policy, laid out as the actor is, in its compute type and without gradients.

    An actor that trains adapters keeps the weights of the start: with the adapters off its policy is the reference.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ActorConfig,
        layout: TrainingLayout,
        temperature: float,
        actors: Policy | None = None,
    ) -> None:
        super().__init__(layout, Flops.of(read_config(model)).cost)
        if actors is not None and config.lora.rank:
            self.policy = actors
        else:
            fuse, reshard = config.fuses(layout.device), config.reshards(layout.dp_shard)
            self.policy = load_policy(model, layout, trains=False, fuse=fuse, reshard=reshard)
        self.max_tokens, self.temperature = config.max_tokens_per_microbatch, temperature
        # The actor's own policy is the actor's to move.
        self.offloads = "reference" in config.offload and self.policy is not actors
        self.offloaded = HostOffload(layout.device)
        self.offload()

    def offload(self) -> None:
        """Move the weights into the host's memory, where actor.offload says so."""
        if self.offloads:
            self.offloaded.offload(self.policy.parameters())

    def reload(self) -> None:
        """Begin to bring them back, while rewards are graded."""
        self.offloaded.reload()

    @dispatched("tokens", "response_mask")
    def compute_logprobs(self, batch: TensorDict) -> TensorDict:
        """The reference's log-probabilities of the sampled tokens, as a batch with the field ref_logprobs [B, *]."""
        self.reload()
        self.offloaded.wait()
        with adapters_off(self.policy):
            result = compute_logprobs(self.policy, self.group, batch, "ref_logprobs", self.max_tokens, self.temperature)
        self.offload()
        return result
