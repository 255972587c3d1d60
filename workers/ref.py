"""The RefWorker: the policy as it was at the start, frozen, for the KL term."""

from tensordict import TensorDict

from workers.actor import ActorConfig, compute_logprobs
from workers.dispatch import Worker, dispatched
from workers.parallel.flops import Flops
from workers.parallel.lora import adapters_off
from workers.parallel.mesh import Layout
from workers.parallel.policy import ModelConfig, Policy, load_policy, read_config


class RefWorker(Worker):
    """The reference policy, laid out as the actor is, in its compute type and without gradients.

    An actor that trains adapters keeps the weights of the start: with the adapters off its policy is the reference.
    """

    def __init__(
        self, model: ModelConfig, config: ActorConfig, layout: Layout, temperature: float, actors: Policy | None = None
    ) -> None:
        super().__init__(layout, Flops.of(read_config(model)).cost)
        if actors is not None and config.lora.rank:
            self.policy = actors
        else:
            fuse = config.fuses(layout.device)
            self.policy = load_policy(model, layout, trains=False, fuse=fuse, reshard=config.reshard)
        self.max_tokens, self.temperature = config.max_tokens_per_microbatch, temperature

    @dispatched("tokens", "response_mask")
    def compute_logprobs(self, batch: TensorDict) -> TensorDict:
        """The reference's log-probabilities of the sampled tokens, as a batch with the field ref_logprobs [B, *]."""
        with adapters_off(self.policy):
            return compute_logprobs(self.policy, batch, "ref_logprobs", self.max_tokens, self.temperature)
