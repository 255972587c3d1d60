"""Packaging. `pip install -e .` for the trainer, `.[test]` its tests, `.[lora]` adapters, `.[sglang]` GPU rollouts."""

from setuptools import find_packages, setup

# Tasks of reasoning_gym:NAME, and what reads the small model of examples/run_pretrained.sh.
PRETRAINED = ["reasoning-gym>=0.1.25", "gguf>=0.17", "accelerate"]

setup(
    name="grpo-trainer",
    version="0.1.0",
    description="A GRPO trainer small enough to read in an afternoon, and that proves it is right",
    license="Apache-2.0",
    python_requires=">=3.11,<3.15",
    packages=find_packages(include=["grpo*", "workers*", "trainer*", "rewards*", "environments*"]),
    install_requires=[
        "torch>=2.11,<2.14",
        "transformers>=5.12,<5.13",
        "tensordict>=0.12",
        "datasets>=4",
        "safetensors",
        "omegaconf>=2.3",
        "rich>=13",
        "math-verify>=0.8",
        "wandb",
        "matplotlib",
        "numpy",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-timeout", "hypothesis", "ruff", "tensorboard", "peft>=0.19,<0.22", *PRETRAINED],
        "pretrained": PRETRAINED,
        "lora": ["peft>=0.19,<0.22"],
        "tensorboard": ["tensorboard"],
        # The set that was run on GPUs: it asks for torch 2.11.0. One of its packages, outlines-core, has nothing newer.
        "sglang": ["sglang>=0.5.17,<0.5.18; python_version < '3.13'"],
    },
)
