"""A Hugging Face causal language model as the trainer runs it: packed, tensor-parallel, sharded by FSDP2.

`load_policy` builds it on the meta device, cuts it over the mesh and reads from safetensors what each rank needs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from grpo.config import ConfigError, choose, option
from workers.parallel.attention import Packing, flash4_failure, packed_class, rotary_angles
from workers.parallel.flash4 import why_not
from workers.parallel.flops import head_width
from workers.parallel.logprobs import Head, Loss, head_logprobs, head_loss
from workers.parallel.lora import LoraConfig, add_adapters, original_name, reset_adapters
from workers.parallel.mesh import TrainingLayout
from workers.parallel.tensor import split_over_tensor_mesh

SUPPORTED = ("qwen2", "qwen3", "llama")
ATTENTIONS = ("auto", "torch", "flash4")
PREFIX = "causal_lm."
ANY_LENGTH = {"triton.mix_order_reduction_non_strict_mode": True}
"""For Inductor: a norm's gradients are fused however many tokens there are. Else it asks for at least 4096, among
others, and compiles the layers again in the middle of a run for the first micro-batch with fewer
(https://github.com/pytorch/pytorch/pull/171941)."""

SMALLEST_UNIT = 1_000_000
"""Parameters from which on a layer is gathered alone: smaller ones cost more in collectives than they save."""


@dataclass
class ModelConfig:
    path: str = option("", "Hugging Face folder or hub name of the policy to start from.")
    dtype: str = option(
        "auto",
        "Compute type: auto (bfloat16 on CUDA, float32 on a CPU), bfloat16 or float32. "
        "Master weights and optimizer state are float32 always.",
    )
    attention: str = option(
        "auto",
        "Attention of the trainer on CUDA: torch (its own), flash4 (FlashAttention 4, which SGLang's CUDA packages "
        "bring) or auto (flash4 where a trial at the start agrees with torch, else torch).",
    )


class Policy(nn.Module):
    """`causal_lm` answering with log-probabilities: the one forward pass of actor, reference and warm start.

    Tied embeddings are kept once, as `embed_tokens`: the language-model head is dropped and its weight read from
    there.
    """

    def __init__(self, causal_lm: transformers.PreTrainedModel, layout: TrainingLayout, fuse: bool = False) -> None:
        super().__init__()
        self.causal_lm, self.layout, self.fuse = causal_lm, layout, fuse
        self.tied = causal_lm.config.tie_word_embeddings
        if self.tied:
            causal_lm.lm_head = nn.Identity()

    def forward(
        self,
        tokens_T: torch.Tensor,
        lengths: list[int],
        wanted_N: torch.Tensor,
        temperature: float,
        entropy: bool = True,
        loss: Loss | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | torch.Tensor:
        """log p(tokens[t] | tokens[<t]) and the entropy of that distribution at the places t in wanted_N.

        tokens_T: [T] int64, the sequences of `lengths` side by side. wanted_N: [N] int64, the first token of no
        sequence. temperature divides the logits. Returns two [N] float32 tensors, the second None without `entropy`;
        or, where a `loss` of them is given, its sum (see head_loss).
        """
        packing = Packing.of(lengths, tokens_T.device)
        model = self.causal_lm.model
        hidden = model.embed_tokens(tokens_T[None])
        angles = rotary_angles(*model.rotary_emb(hidden, packing.positions[None]))
        for layer in model.layers:
            hidden = layer(hidden, position_embeddings=angles, packing=packing)
        hidden_NH = model.norm(hidden)[0].index_select(0, wanted_N - 1)
        weight = model.embed_tokens.weight if self.tied else self.causal_lm.lm_head.weight
        first, group = 0, None
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            weight, group = weight.to_local(), mesh.get_group()
            first = mesh.get_local_rank() * weight.shape[0]
        head = Head(weight, tokens_T[wanted_N], temperature, first, group, fuse=self.fuse)
        return head_logprobs(hidden_NH, head, entropy) if loss is None else head_loss(hidden_NH, head, loss)

    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters under their Hugging Face names; those of adapters are not among them."""
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
    fuse: bool = False,
    recompute: str = "none",
    reshard: bool = True,
    lora: LoraConfig | None = None,
) -> Policy:
    """The policy of `config.path` cut over `layout`, in float32 where it trains and in its compute type otherwise.

    `fuse`: compile each layer, for any number of tokens, and run the head's kernels. `recompute`: which layers are
    computed again on the way back instead of keeping what they computed: none, selective (every other) or full.
    `reshard`: free a layer's gathered weights after each use, instead of keeping them until `Policy.reshard_all`.
    `lora`: its adapters are what trains, where it has a rank. Raises ConfigError for what `read_config` and
    `check_layout` refuse.
    """
    hf_config = read_config(config)
    check_layout(hf_config, layout.tp_size)
    compute = compute_dtype(config, layout.device)
    flash4 = not why_not_flash4(config, hf_config, layout.device)
    adapts = lora is not None and lora.rank > 0
    # Frozen weights are only ever read in the compute type: float32 would be memory for digits that nothing sees.
    dtype = torch.float32 if trains and not adapts else compute
    with torch.device("meta"):
        causal_lm = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        if adapts:
            add_adapters(causal_lm, lora)
    policy = Policy(causal_lm, layout, fuse)
    if layout.tp_size > 1:
        split_over_tensor_mesh(causal_lm, layout.tp_mesh)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for index, layer in enumerate(causal_lm.model.layers):
        layer.self_attn.__class__ = packed_class(type(layer.self_attn), flash4)
        # The forward methods alone: FSDP's hooks stay outside.
        if fuse:
            compiled = torch.compile(layer.forward, options=ANY_LENGTH)
            layer.forward = functools.partial(_for_any_length, compiled)
        if recompute == "full" or (recompute == "selective" and index % 2):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        if sum(parameter.numel() for parameter in layer.parameters()) >= SMALLEST_UNIT:
            fully_shard(layer, mesh=layout.fsdp_mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(policy, mesh=layout.fsdp_mesh, mp_policy=precision, reshard_after_forward=False)
    policy.to_empty(device=layout.device)
    # Buffers are not in any file: they are computed from the config, and were empty on the meta device.
    rotary = causal_lm.model.rotary_emb
    causal_lm.model.rotary_emb = type(rotary)(hf_config, device=layout.device)
    dcp.load(policy.weights(), storage_reader=dcp.HuggingFaceStorageReader(local_folder(config.path)))
    reset_adapters(causal_lm)
    if not trains:
        policy.requires_grad_(False)
    return policy.train(trains)


def _for_any_length(
    compiled: Callable, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], packing: Packing
) -> torch.Tensor:
    """A compiled layer, told that it will see other numbers of tokens and sequences, and that nothing else changes."""
    for tensor in (hidden, *position_embeddings):
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    for tensor in (packing.starts, packing.span):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return compiled(hidden, position_embeddings=position_embeddings, packing=packing)


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of the forward and backward pass; raises ConfigError for a name that is not one."""
    names = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    names["auto"] = torch.bfloat16 if device.type == "cuda" else torch.float32
    if config.dtype not in names:
        raise ConfigError(f"model.dtype={config.dtype!r} is not a choice: use auto, bfloat16 or float32.")
    return names[config.dtype]


def why_not_flash4(config: ModelConfig, hf_config: transformers.PretrainedConfig, device: torch.device) -> str:
    """Why attention on `device` is not FlashAttention 4's, as the end of a sentence; empty where it is.

    Raises ConfigError where that was asked for in vain.
    """
    choose(config.attention, ATTENTIONS, "model.attention")
    if config.attention == "torch":
        return "model.attention=torch"
    reason, width = why_not(device), head_width(hf_config)
    if not reason and compute_dtype(config, device) == torch.float32:
        reason = "the compute type is float32"
    if not reason and width not in (64, 128):
        reason = f"the model's heads are {width} wide, not 64 or 128"
    if not reason:
        heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
        reason = flash4_failure(device, compute_dtype(config, device), heads, kv_heads, width)
    if reason and config.attention == "flash4":
        raise ConfigError(f"model.attention=flash4 cannot be: {reason}. Use auto or torch.")
    return reason


def read_config(config: ModelConfig) -> transformers.PretrainedConfig:
    """The Hugging Face config of the model; raises ConfigError where there is none or its type is not supported."""
    if not config.path:
        raise ConfigError("No model was named: set model.path to a Hugging Face folder or hub name.")
    looks_local = config.path.startswith((".", "/", "~")) or config.path.count("/") > 1
    if looks_local and not Path(config.path).is_dir():
        raise ConfigError(f"model.path={config.path} is not a folder: check the path, or use a hub name.")
    try:
        hf_config = transformers.AutoConfig.from_pretrained(config.path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={config.path} has no config that transformers can read, as a folder or on "
            f"the hub ({str(error).splitlines()[0]})."
        ) from error
    if hf_config.model_type not in SUPPORTED:
        raise ConfigError(
            f"model.path={config.path} is of type {hf_config.model_type!r}, which is not supported: "
            f"use one of {', '.join(SUPPORTED)}."
        )
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        raise ConfigError(
            f"model.path={config.path} uses sliding-window attention, which is not supported: set "
            "use_sliding_window to false in its config.json or use another model."
        )
    return hf_config


def read_tokenizer(config: ModelConfig) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer beside the model; raises ConfigError where there is none or it has no end-of-sequence token."""
    try:
        # For some model types AutoTokenizer puts a class of its own, with its own way to split text, before the one
        # that was saved; a folder that says its tokenizer.json is all there is gets exactly that.
        saved_class = get_tokenizer_config(config.path).get("tokenizer_class")
        plain = saved_class in ("PreTrainedTokenizerFast", "TokenizersBackend")
        reader = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
        tokenizer = reader.from_pretrained(config.path)
        # Where there is no file of it, some classes make a tokenizer of their special tokens alone.
        if len(tokenizer) == len(set(tokenizer.all_special_ids)):
            raise ValueError("what is there knows no words")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={config.path} has no tokenizer that transformers can read: save one there "
            f"with tokenizer.save_pretrained ({str(error).splitlines()[0]})."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"The tokenizer of model.path={config.path} has no end-of-sequence token: set eos_token "
            "in its tokenizer_config.json."
        )
    return tokenizer


def check_layout(hf_config: transformers.PretrainedConfig, tensor: int) -> None:
    """Raise ConfigError for the first size of the model that `tensor` does not divide."""
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    for name in sizes:
        size = getattr(hf_config, name)
        if size % tensor:
            raise ConfigError(
                f"actor.tensor_parallel={tensor} does not divide the model's {name}={size}: use a divisor of {size}."
            )


def local_folder(path: str) -> str:
    """The folder with the safetensors of a Hugging Face folder or hub name, downloaded if need be.

    Raises ConfigError where there are none.
    """
    folder = path
    if not Path(path).is_dir():
        from huggingface_hub import snapshot_download

        folder = snapshot_download(path, allow_patterns=["*.safetensors", "*.json"])
    if not any(Path(folder).glob("*.safetensors")):
        raise ConfigError(f"model.path={path} has no *.safetensors: save it with save_pretrained of transformers 5.")
    return folder
