"""What is read of a model from a Hugging Face folder or the hub: its config, its tokenizer, where its weights lie."""

import json
import re
from contextlib import suppress
from pathlib import Path

import httpx
import torch
import transformers
from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from grpo.config import ConfigError
from grpo.sources import HUB_SECONDS, reason
from workers.config import ModelConfig
from workers.models import family_of


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of the forward and backward pass: `prove` sets float64 too."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


def read_config(config: ModelConfig) -> transformers.PretrainedConfig:
    """The Hugging Face config of the model; raises ConfigError where there is none or it is not supported."""
    if not config.path:
        raise ConfigError("No model was named: set model.path to a Hugging Face folder or hub name.")
    looks_local = config.path.startswith((".", "/", "~")) or config.path.count("/") > 1
    refuse_other_formats(config.path)
    if looks_local and not Path(config.path).is_dir():
        raise ConfigError(f"model.path={config.path} is not a folder: check the path, or use a hub name.")
    expect_hub(config.path)
    try:
        hf_config = transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=False)
    except Exception as error:  # its checks raise what they like
        if "custom code" in str(error):
            way_out = "use one of the models in README.md"
            raise ConfigError(f"model.path={config.path} is made of code of its own, not run: {way_out}.") from error
        why = " ".join(str(error).split()).rstrip(".")
        found = f"no config that transformers can read, as a folder or on the hub ({why})"
        raise ConfigError(f"model.path={config.path} has {found}: give a model that save_pretrained wrote.") from error
    family_of(hf_config)
    if method := (getattr(hf_config, "quantization_config", None) or {}).get("quant_method"):
        way_out = "use the folder that it was made from, with weights in bfloat16 or float32"
        raise ConfigError(f"model.path={config.path} is quantized ({method}) and cannot be trained: {way_out}.")
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        way_out = "set use_sliding_window to false in its config.json or use another model"
        raise ConfigError(f"model.path={config.path} uses sliding-window attention, which is not supported: {way_out}.")
    return hf_config


def expect_hub(path: str) -> None:
    """Raise ConfigError where `path` is on the hub alone, which does not answer; transformers asks for minutes."""
    if Path(path).is_dir() or constants.HF_HUB_OFFLINE:
        return
    with suppress(HFValidationError, httpx.HTTPStatusError):  # of which transformers says what is wrong
        if try_to_load_from_cache(path, "config.json") is not None:
            return
        try:
            HfApi().model_info(path, timeout=HUB_SECONDS)
        except httpx.TransportError as error:
            wrong = f"is no folder here and the Hugging Face hub cannot be reached ({reason(error)})"
            raise ConfigError(f"model.path={path} {wrong}; give the path of a local folder.") from error


def read_tokenizer(config: ModelConfig) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer beside the model; raises ConfigError where there is none or it has no end-of-sequence token."""
    expect_hub(config.path)
    try:
        # For some model types AutoTokenizer prefers a class of its own, which splits text in its own way, to the one
        # that was saved. A folder whose tokenizer_config.json names the general class gets just its tokenizer.json.
        saved_class = get_tokenizer_config(config.path).get("tokenizer_class")
        plain = saved_class in ("PreTrainedTokenizerFast", "TokenizersBackend")
        reader = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
        tokenizer = reader.from_pretrained(config.path, trust_remote_code=False)
        # Without a file some classes make a tokenizer of nothing but their special tokens.
        if len(tokenizer) == len(set(tokenizer.all_special_ids)):
            raise ValueError("what is there knows no words")
    except (OSError, ValueError) as error:
        way_out = f"save one there with tokenizer.save_pretrained ({str(error).splitlines()[0]})"
        fault = f"model.path={config.path} has no tokenizer that transformers can read"
        raise ConfigError(f"{fault}: {way_out}.") from error
    if tokenizer.eos_token_id is None:
        way_out = "set eos_token in its tokenizer_config.json"
        raise ConfigError(f"The tokenizer of model.path={config.path} has no end-of-sequence token: {way_out}.")
    return tokenizer


def refuse_other_formats(name: str) -> None:
    """Raise ConfigError, which says how to convert it, for a model that is there but not as safetensors."""
    path, fault = Path(name), f"model.path={name}"
    convert = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
    convert = f"python -c \"{convert}any(x.from_pretrained({{}}).save_pretrained('OUT') for x in (M, T))\", and use OUT"
    gguf = [path] if path.is_file() and path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if path.is_file() and not gguf:
        raise ConfigError(f"{fault} is a file: give the folder that it is in, with its config.json and tokenizer.")
    if not path.exists() or any(path.glob("model*.safetensors")):
        return
    if gguf:
        line = convert.format(f"'{gguf[0].parent}', gguf_file='{gguf[0].name}'")
        raise ConfigError(f"{fault} is a GGUF, which is not read: pip install gguf accelerate, convert it by {line}.")
    if (path / "adapter_config.json").is_file():
        named = re.search(r'"base_model_name_or_path": "(.*)"', (path / "adapter_config.json").read_text())
        base = named[1] if named else "an unknown model"
        line = "from peft import AutoPeftModelForCausalLM as M; M.from_pretrained('{}').merge_and_unload()"
        line = f"python -c \"{line.format(path)}.save_pretrained('OUT')\", copy the tokenizer there, and use OUT"
        raise ConfigError(f"{fault} holds an adapter of {base}, not a model: merge them by {line}.")
    if any(path.glob("pytorch_model*.bin")):
        line = convert.format(f"'{path}'")
        raise ConfigError(f"{fault} has pytorch_model.bin but no *.safetensors: convert it by {line}.")
    if (path / "checkpoints").is_dir() or (path / "progress.json").is_file():
        raise ConfigError(f"{fault} is of a run: write its policy with python -m trainer export RUN OUT, and use OUT.")


def local_folder(path: str) -> str:
    """The folder with the safetensors of a folder or hub name, downloaded if need be; ConfigError if there are none."""
    try:
        folder = path if Path(path).is_dir() else snapshot_download(path, allow_patterns=["*.safetensors", "*.json"])
    except OSError as error:
        raise ConfigError(f"model.path={path} could not be downloaded: {str(error).splitlines()[0]}.") from error
    if not any(Path(folder).glob("*.safetensors")):
        raise ConfigError(f"model.path={path} has no *.safetensors: save it with save_pretrained of transformers 5.")
    return folder


def check_weights(config: ModelConfig) -> None:
    """Raise ConfigError where a file of the weights is missing or damaged, or they are not those of config.json.

    Reads the headers of the files alone, which tell where each weight begins and ends.
    """
    hf_config, folder, found = read_config(config), Path(local_folder(config.path)), {}
    again = "copy or download the folder again, as a whole"
    for file in sorted(folder.glob("*.json")):  # a generation_config.json that is none would be passed over
        try:
            held = json.loads(file.read_text())
            names = set(held["weight_map"].values()) if file.name == "model.safetensors.index.json" else ()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} is damaged or cut off ({reason(error)}): {again}.") from error
        for name in sorted(names):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder} lacks {name}, which {file.name} lists: {again}.")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as weights:
                found |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged or cut off ({error}): {again}.") from error
    family = family_of(hf_config)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(hf_config)
    except Exception as error:  # as of any setting that it does not know
        fault = f"transformers cannot build the model of its config.json ({type(error).__name__}: {reason(error)})"
        raise ConfigError(f"model.path={config.path}: {fault}; use the config.json that belongs to it.") from error
    if (tokens := read_tokenizer(config).vocab_size) > hf_config.vocab_size:
        fault = f"its tokenizer has {tokens} tokens, and vocab_size={hf_config.vocab_size}"
        raise ConfigError(f"model.path={config.path}: {fault}; use the tokenizer that belongs to it.")
    wanted = {family.file_name(name): tuple(weight.shape) for name, weight in model.named_parameters()}
    missing = len(wanted.keys() - found.keys())
    for name, shape in wanted.items():
        if name not in found:
            fault = f"has no weight {name} ({missing} of {len(wanted)} are missing)"
            raise ConfigError(f"model.path={config.path} {fault}: save it with AutoModelForCausalLM's save_pretrained.")
        if found[name] != shape:
            fault = f"has the shape {found[name]}, and by config.json {shape}"
            raise ConfigError(f"model.path={config.path}: {name} {fault}; use the config.json that belongs to it.")


def check_same_tokens(policy: ModelConfig, teacher: ModelConfig) -> None:
    """Raise ConfigError where an id that `policy` may sample is another token to `teacher`, or none."""
    ours, theirs = read_tokenizer(policy), read_tokenizer(teacher)
    mine, its, same = ours.get_vocab(), theirs.get_vocab(), "use a teacher of the same tokenizer"
    if differing := sorted(mine.items() ^ its.items(), key=lambda pair: pair[1]):
        token, count = differing[0][0], len({token for token, _ in differing})
        ids = f"id {its.get(token, 'none')} there and {mine.get(token, 'none')} for the policy"
        raise ConfigError(f"{count} tokens of model.path={teacher.path} are others, such as {token!r}, {ids}: {same}.")
    for name in ("bos_token", "eos_token"):
        if (its := getattr(theirs, name)) != (mine := getattr(ours, name)):
            raise ConfigError(f"model.path={teacher.path} has the {name} {its!r}, and the policy {mine!r}: {same}.")
    rows, most = read_config(teacher).vocab_size, read_config(policy).vocab_size
    if rows < most:  # there may be more of them than tokens, on either side
        raise ConfigError(f"model.path={teacher.path} has vocab_size={rows}, and the policy samples of {most}: {same}.")


def stop_tokens(config: ModelConfig) -> tuple[int, ...]:
    """The ids that end a response: the end of sequence of the tokenizer, of the model and of its generation config."""
    found = [read_tokenizer(config).eos_token_id, read_config(config).eos_token_id]
    with suppress(OSError):
        found.append(transformers.GenerationConfig.from_pretrained(config.path).eos_token_id)
    return tuple(sorted({i for ids in found if ids is not None for i in (ids if isinstance(ids, list) else [ids])}))
