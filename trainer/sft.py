"""Supervised training on demonstrations: `python -m trainer sft`, the warm start before reinforcement learning."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict

from grpo.advantages import weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, make_batch
from grpo.config import to_yaml
from grpo.data import PromptStream, load_prompts, tokenize_responses
from trainer.checkpoint import Checkpoints, export
from trainer.config import SftConfig, sizes_table
from trainer.tracking import Stopwatch, Tracker
from workers.actor import ActorWorker
from workers.dispatch import on_controller
from workers.parallel.mesh import make_training_layout
from workers.parallel.policy import read_tokenizer


class Demonstrations:
    """Prompts with the responses to imitate, in a seeded order without end. Raises ConfigError as the data does."""

    def __init__(self, config: SftConfig, position: dict | None) -> None:
        tokenizer = read_tokenizer(config.model)
        prompts = list(load_prompts(config.data, tokenizer, "train"))
        responses = tokenize_responses(prompts, tokenizer, config.data)
        self.responses = {prompt.index: response for prompt, response in zip(prompts, responses, strict=True)}
        longest = max(len(prompt.tokens) + len(self.responses[prompt.index]) for prompt in prompts)
        config.check_length(longest, "the longest demonstration")
        self.stream = PromptStream(
            prompts, config.samples_per_step, config.seed, config.data.shuffle, key="samples_per_step"
        )
        if position is not None:
            self.stream.load_state_dict(position)

    def next(self) -> TensorDict:
        """The batch of the next step, with tokens, response_mask and weights, each [B, *]."""
        prompts = self.stream.next()
        tokens = [torch.tensor(prompt.tokens + self.responses[prompt.index]) for prompt in prompts]
        mask = [torch.arange(len(row)) >= len(prompt.tokens) for row, prompt in zip(tokens, prompts, strict=True)]
        batch = make_batch({"tokens": jagged(tokens), "response_mask": jagged(mask)})
        return weigh_tokens(batch, AlgorithmConfig(aggregate="token_mean"))


def run_sft(config: SftConfig, device: torch.device, run_folder: Path) -> Path:
    """Train the policy to imitate `data.response_column`; returns the Hugging Face folder it leaves, RUN/model."""
    controls = dist.get_rank() == 0
    checkpoints = Checkpoints(run_folder, config.checkpoint.keep)
    resumed = checkpoints.newest() if config.checkpoint.resume else None
    progress = {"step": 0, "data": None} if resumed is None else checkpoints.progress(resumed)
    done = progress["step"]
    with ExitStack() as stack:
        data = on_controller(lambda: Demonstrations(config, progress["data"]))
        watch, tracker = Stopwatch(device.type == "cuda"), None
        if controls:
            tracker = stack.enter_context(Tracker(config.tracking, run_folder, config.steps, asdict(config), done))
            tracker.say(sizes_table(config, dist.get_world_size()))
            (run_folder / "config.yaml").write_text(to_yaml(config))
            if resumed is None:
                checkpoints.start_anew()
        layout = make_training_layout(device, config.actor.replicate, config.actor.tensor_parallel)
        actor = ActorWorker(config.model, config.actor, AlgorithmConfig(), layout, 1.0, config.steps)
        if resumed is not None:
            checkpoints.load(resumed, actor)
        for step in range(done + 1, config.steps + 1):
            with watch("step"):
                metrics = actor.imitate(data.next() if controls else None)
            if tracker is not None:
                tracker.log(step, {**metrics, **watch.metrics()})
            if step == config.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
                checkpoints.save(step, actor, data.stream.state_dict() if controls else None)
        if controls:
            export(run_folder, run_folder / "model", config.model)
            tracker.say(f"The policy is in {run_folder / 'model'}, an ordinary Hugging Face folder.")
    return run_folder / "model"
