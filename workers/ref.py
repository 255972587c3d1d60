"""The RefWorker: a frozen policy, which is the one of the start, for the KL term, or a teacher."""

from tensordict import TensorDict

from grpo.batch import make_batch
from workers.actor import response_logprobs
from workers.config import ActorConfig, ModelConfig
from workers.dispatch import Worker, dispatched
from workers.models import family_of
from workers.models.hub import read_config
from workers.offload import HostOffload
from workers.parallel.lora import adapters_off
from workers.parallel.mesh import TrainingLayout
from workers.parallel.policy import Policy, load_policy


class RefWorker(Worker):
    """The policy of `model`, laid out as the actor's, which writes the field NAME_logprobs.

    actors: the policy in training, where that began as `model`: beside adapters it serves here with them off.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ActorConfig,
        layout: TrainingLayout,
        temperature: float,
        actors: Policy | None = None,
        name: str = "ref",
    ) -> None:
        super().__init__(layout, family_of(read_config(model)).flops().cost)
        shared = actors is not None and config.lora.rank > 0
        compiled, reshard = config.compiles(layout.device), config.reshards(layout.dp_shard)
        self.policy = actors if shared else load_policy(model, layout, trains=False, compiled=compiled, reshard=reshard)
        self.max_tokens, self.temperature, self.name = config.max_tokens_per_microbatch, temperature, name
        self.offloads = "reference" in config.offload and not shared  # the actor's own policy is the actor's to move
        self.offloaded = HostOffload(layout.device)
        self.offload()

    def offload(self) -> None:
        """Move the weights into the host's memory, if actor.offload says so."""
        if self.offloads:
            self.offloaded.offload(self.policy.parameters())

    def reload(self) -> None:
        """Begin to bring them back, while rewards are graded."""
        self.offloaded.reload()

    @dispatched("tokens", "response_mask")
    def compute_logprobs(self, batch: TensorDict) -> TensorDict:
        """The controller's batch with the field NAME_logprobs [B, *] float32, this policy's own; None elsewhere."""
        self.reload()
        self.offloaded.wait()
        with adapters_off(self.policy):
            logprobs = response_logprobs(self.policy, self.group, batch, self.max_tokens, self.temperature)
        self.offload()
        return make_batch({f"{self.name}_logprobs": logprobs})
