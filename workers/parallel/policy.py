"""A Hugging Face causal language model as the trainer runs it: packed, tensor-parallel, sharded by FSDP2."""

import functools
from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from workers.config import LoraConfig, ModelConfig
from workers.microbatch import MicroBatch
from workers.models import family_of
from workers.models.hub import compute_dtype, local_folder, read_config
from workers.parallel.attention import PackedSequences, packed_class, rotary_angles
from workers.parallel.attention_backend import why_not_flash4
from workers.parallel.logprobs import Head, Loss, head_logprobs, head_loss
from workers.parallel.lora import add_adapters, original_name, reset_adapters
from workers.parallel.mesh import TrainingLayout
from workers.parallel.tensor import parallelize

PREFIX = "causal_lm."
SMALLEST_UNIT = 1_000_000
"""Parameters from which on a layer is gathered alone: smaller ones cost more in collectives than they save."""

ANY_LENGTH = {"triton.mix_order_reduction_non_strict_mode": True}
"""Makes Inductor fuse a norm's gradients for any number of tokens. By default it wants, among others, at least 4096,
and compiles the layers again in the middle of a run for the first micro-batch with fewer
(https://github.com/pytorch/pytorch/pull/171941)."""


class Policy(nn.Module):
    """`causal_lm` answering with log-probabilities: the one forward pass of actor, frozen policies and warm start."""

    def __init__(self, causal_lm: transformers.PreTrainedModel, layout: TrainingLayout, compiled: bool = False) -> None:
        super().__init__()
        self.causal_lm, self.layout, self.compiled = causal_lm, layout, compiled
        self.tied = causal_lm.config.tie_word_embeddings
        if self.tied:  # kept once, as embed_tokens, which the language-model head then reads
            causal_lm.lm_head = nn.Identity()

    def forward(
        self, micro: MicroBatch, temperature: float, entropy: bool = True, loss: Loss | None = None
    ) -> tuple[Tensor, Tensor | None] | Tensor:
        """log p(tokens[t] | tokens[<t]) of the N response tokens, and the entropy of each one's distribution.

        temperature divides the logits. Returns two [N] float32 tensors, the second None without `entropy`; or, where
        a `loss` of them is given, its sum (see head_loss).
        """
        model = self.causal_lm.model
        hidden = model.embed_tokens(micro.tokens[None])
        angles = rotary_angles(*model.rotary_emb(hidden, micro.sequences.positions[None]))
        for layer in model.layers:
            hidden = layer(hidden, position_embeddings=angles, sequences=micro.sequences)
        hidden_NH = model.norm(hidden)[0].index_select(0, micro.predictors)
        weight = model.embed_tokens.weight if self.tied else self.causal_lm.lm_head.weight
        group = None
        if self.layout.tp_size > 1:
            weight, group = weight.to_local(), self.layout.tp_mesh.get_group()
        vocab_start = self.layout.tp_rank * len(weight)
        head = Head(weight, micro.targets, temperature, vocab_start, group, compiled=self.compiled)
        return head_logprobs(hidden_NH, head, entropy) if loss is None else head_loss(hidden_NH, head, loss)

    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters under their Hugging Face names, without those of adapters."""
        named = ((original_name(name), parameter) for name, parameter in self.causal_lm.named_parameters())
        return {name: parameter for name, parameter in named if name is not None}

    @functools.cached_property
    def sharded(self) -> list[FSDPModule]:
        """What FSDP gathers and reduces at a time. Looked up once: there are hundreds of modules."""
        return [module for module in self.modules() if isinstance(module, FSDPModule)]

    def expect_backward(self, reduce: bool, reshard: bool) -> None:
        """Whether the next backward pass reduces the gradients over ranks, and frees gathered weights."""
        for module in self.sharded:
            module.set_requires_gradient_sync(reduce, recurse=False)
            module.set_reshard_after_backward(reshard, recurse=False)

    def reshard_all(self) -> None:
        """Free every layer's gathered weights: what stays are this rank's shards."""
        for module in self.sharded:
            module.reshard()


def load_policy(
    config: ModelConfig,
    layout: TrainingLayout,
    trains: bool = True,
    compiled: bool = False,
    recompute: str = "none",
    reshard: bool = True,
    lora: LoraConfig | None = None,
) -> Policy:
    """The policy of `config.path` cut over `layout`, in float32 where it trains and in its compute type otherwise.

    `compiled`: compile each layer, for any number of tokens, and run the head's Triton kernels. `recompute`: as in
    ActorConfig. `reshard`: free a layer's gathered weights after each use, instead of keeping them until
    `Policy.reshard_all`. `lora`: with a rank above 0, its adapters are what trains. Raises ConfigError for a model
    that is not supported, whose sizes tensor parallelism does not divide, or that has no weights.
    """
    hf_config = read_config(config)
    family = family_of(hf_config)
    family.check_tensor_parallel(layout.tp_size)
    compute = compute_dtype(config, layout.device)
    flash4 = not why_not_flash4(config, hf_config, layout.device)
    adapts = lora is not None and lora.rank > 0
    # Frozen weights are only ever read in the compute type: float32 would be memory for digits that nothing sees.
    wide = torch.promote_types(torch.float32, compute)
    dtype = wide if trains and not adapts else compute
    with torch.device("meta"):
        causal_lm = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        if adapts:
            add_adapters(causal_lm, lora)
    policy = Policy(causal_lm, layout, compiled)
    if layout.tp_size > 1:
        parallelize(causal_lm, layout.tp_mesh, family.cuts)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide)
    for index, layer in enumerate(causal_lm.model.layers):
        layer.self_attn.__class__ = packed_class(type(layer.self_attn), family.attention, flash4)
        # The forward methods alone: FSDP's hooks stay outside.
        if compiled:
            layer.forward = functools.partial(_for_any_length, torch.compile(layer.forward, options=ANY_LENGTH))
        if recompute == "full" or (recompute == "selective" and index % 2):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        if sum(parameter.numel() for parameter in layer.parameters()) >= SMALLEST_UNIT:
            fully_shard(layer, mesh=layout.fsdp_mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(policy, mesh=layout.fsdp_mesh, mp_policy=precision, reshard_after_forward=False)
    policy.to_empty(device=layout.device)
    # Buffers are not in any file: they are computed from the config, and were empty on the meta device.
    causal_lm.model.rotary_emb = type(causal_lm.model.rotary_emb)(hf_config, device=layout.device)
    in_files = {family.file_name(name): parameter for name, parameter in policy.weights().items()}
    dcp.load(in_files, storage_reader=dcp.HuggingFaceStorageReader(local_folder(config.path)))
    reset_adapters(causal_lm)
    if not trains:
        policy.requires_grad_(False)
    return policy.train(trains)


def _for_any_length(
    layer: Callable, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], sequences: PackedSequences
) -> Tensor:
    """Call a compiled layer whose numbers of tokens and sequences will change, and nothing else."""
    for tensor in (hidden, *position_embeddings):
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    for tensor in (sequences.cu_seqlens, sequences.span):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return layer(hidden, position_embeddings=position_embeddings, sequences=sequences)
