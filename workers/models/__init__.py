"""The model families, one file each: the table of them, by Hugging Face's model_type."""

import transformers

from grpo.config import ConfigError
from workers.models.llama import Llama
from workers.models.qwen2 import Qwen2
from workers.models.qwen3 import Qwen3

FAMILIES: dict[str, type[Llama]] = {"qwen2": Qwen2, "qwen3": Qwen3, "llama": Llama}


def family_of(config: transformers.PretrainedConfig) -> Llama:
    """The family of a model of this Hugging Face config; raises ConfigError for a type that is not in the table."""
    if config.model_type not in FAMILIES:
        fault = f"is of type {config.model_type!r}, which is not supported: use one of {', '.join(FAMILIES)}"
        raise ConfigError(f"model.path={config.name_or_path} {fault}.")
    return FAMILIES[config.model_type](config)
