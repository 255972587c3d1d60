"""What is read of a model from a Hugging Face folder or the hub: its config, its tokenizer, where its weights lie."""

from contextlib import suppress
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from grpo.config import ConfigError
from workers.config import ModelConfig
from workers.models import family_of


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of the forward and backward pass; raises ConfigError for a name that is not one."""
    if config.dtype not in ("auto", "bfloat16", "float32"):
        raise ConfigError(f"model.dtype={config.dtype!r} is not a choice: use auto, bfloat16 or float32.")
    half = config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda")
    return torch.bfloat16 if half else torch.float32


def read_config(config: ModelConfig) -> transformers.PretrainedConfig:
    """The Hugging Face config of the model; raises ConfigError where there is none or it is not supported."""
    if not config.path:
        raise ConfigError("No model was named: set model.path to a Hugging Face folder or hub name.")
    looks_local = config.path.startswith((".", "/", "~")) or config.path.count("/") > 1
    if looks_local and not Path(config.path).is_dir():
        raise ConfigError(f"model.path={config.path} is not a folder: check the path, or use a hub name.")
    try:
        hf_config = transformers.AutoConfig.from_pretrained(config.path)
    except (OSError, ValueError) as error:
        found = f"no config that transformers can read, as a folder or on the hub ({str(error).splitlines()[0]})"
        raise ConfigError(f"model.path={config.path} has {found}.") from error
    family_of(hf_config)
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        way_out = "set use_sliding_window to false in its config.json or use another model"
        raise ConfigError(f"model.path={config.path} uses sliding-window attention, which is not supported: {way_out}.")
    return hf_config


def read_tokenizer(config: ModelConfig) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer beside the model; raises ConfigError where there is none or it has no end-of-sequence token."""
    try:
        # For some model types AutoTokenizer prefers a class of its own, which splits text in its own way, to the one
        # that was saved. A folder whose tokenizer_config.json names the general class gets just its tokenizer.json.
        saved_class = get_tokenizer_config(config.path).get("tokenizer_class")
        plain = saved_class in ("PreTrainedTokenizerFast", "TokenizersBackend")
        reader = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
        tokenizer = reader.from_pretrained(config.path)
        # Without a file some classes make a tokenizer of nothing but their special tokens.
        if len(tokenizer) == len(set(tokenizer.all_special_ids)):
            raise ValueError("what is there knows no words")
    except (OSError, ValueError) as error:
        way_out = f"save one there with tokenizer.save_pretrained ({str(error).splitlines()[0]})"
        raise ConfigError(
            f"model.path={config.path} has no tokenizer that transformers can read: {way_out}."
        ) from error
    if tokenizer.eos_token_id is None:
        way_out = "set eos_token in its tokenizer_config.json"
        raise ConfigError(f"The tokenizer of model.path={config.path} has no end-of-sequence token: {way_out}.")
    return tokenizer


def local_folder(path: str) -> str:
    """The folder with the safetensors of a folder or hub name, downloaded if need be; ConfigError if there are none."""
    folder = path if Path(path).is_dir() else snapshot_download(path, allow_patterns=["*.safetensors", "*.json"])
    if not any(Path(folder).glob("*.safetensors")):
        raise ConfigError(f"model.path={path} has no *.safetensors: save it with save_pretrained of transformers 5.")
    return folder


def stop_tokens(config: ModelConfig) -> tuple[int, ...]:
    """The ids that end a response: the end of sequence of the tokenizer, of the model and of its generation config."""
    found = [read_tokenizer(config).eos_token_id, read_config(config).eos_token_id]
    with suppress(OSError):
        found.append(transformers.GenerationConfig.from_pretrained(config.path).eos_token_id)
    return tuple(sorted({i for ids in found if ids is not None for i in (ids if isinstance(ids, list) else [ids])}))
