"""Supervised training on demonstrations: `python -m trainer sft`, the warm start before reinforcement learning."""

from contextlib import ExitStack
from dataclasses import asdict

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
from trainer.runs import Run
from trainer.tracking import Stopwatch, Tracker
from workers.actor import ActorWorker
from workers.dispatch import on_controller
from workers.models.hub import read_tokenizer
from workers.parallel.mesh import make_training_layout


class Demonstrations:
    """Prompts with the responses to imitate; raises ConfigError where the data cannot be used or one is too long."""

    def __init__(self, config: SftConfig, state: dict | None) -> None:
        tokenizer = read_tokenizer(config.model)
        prompts = list(load_prompts(config.data, tokenizer, "train"))
        responses = tokenize_responses(prompts, tokenizer, config.data)
        self.responses = {prompt.index: response for prompt, response in zip(prompts, responses, strict=True)}
        longest = max(len(prompt.tokens) + len(self.responses[prompt.index]) for prompt in prompts)
        config.check_length(longest, "the longest demonstration")
        self.stream = PromptStream(
            prompts, config.samples_per_step, config.seed, config.data.shuffle, "samples_per_step"
        )
        if state is not None:
            self.stream.load_state_dict(state)

    def next(self) -> TensorDict:
        """The batch of the next step, with tokens, response_mask and loss_weights, each [B, *]."""
        prompts = self.stream.next()
        tokens = [torch.tensor(prompt.tokens + self.responses[prompt.index]) for prompt in prompts]
        mask = [torch.arange(len(row)) >= len(prompt.tokens) for row, prompt in zip(tokens, prompts, strict=True)]
        batch = make_batch({"tokens": jagged(tokens), "response_mask": jagged(mask)})
        return weigh_tokens(batch, AlgorithmConfig(aggregate="token_mean"))


def run_sft(config: SftConfig, device: torch.device, run: Run) -> None:
    """Train the policy to imitate `data.response_column`, and leave it as a Hugging Face folder, RUN/model."""
    checkpoints, watch = Checkpoints(run.folder, config.checkpoint.keep), Stopwatch(device.type == "cuda")
    with ExitStack() as stack:

        def begin() -> tuple[Demonstrations, Tracker]:
            data, said = Demonstrations(config, run.data), run.begin()
            tracker = stack.enter_context(Tracker(config.tracking, run.folder, config.steps, asdict(config), run.step))
            (run.folder / "config.yaml").write_text(to_yaml(config))
            tracker.say(said)
            tracker.say(sizes_table(config, dist.get_world_size()))
            return data, tracker

        data, tracker = on_controller(begin) or (None, None)
        layout = make_training_layout(device, config.actor.replicate, config.actor.tensor_parallel)
        actor = ActorWorker(config.model, config.actor, AlgorithmConfig(), layout, 1.0, config.steps)
        if run.resumed is not None:
            checkpoints.load(run.resumed, actor)
        for step in range(run.step + 1, config.steps + 1):
            with watch("step"):
                metrics = actor.sft_update(data.next() if tracker else None)
            if tracker is not None:
                tracker.log(step, metrics | watch.metrics())
            if step == config.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
                checkpoints.save(step, actor, data.stream.state_dict() if tracker else None)
        if tracker is not None:
            export(run.folder, run.folder / "model")
            tracker.say(f"The policy is in {run.folder / 'model'}, an ordinary Hugging Face folder.")
