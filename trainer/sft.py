"""Supervised training on demonstrations: `python -m trainer sft`, the warm start before reinforcement learning."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from grpo.advantages import weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import concatenate, jagged, make_batch
from grpo.config import ConfigError, to_yaml, without_secrets
from grpo.data import Prompt, PromptStream, load_prompts, tokenize_responses
from grpo.data_config import DataConfig
from trainer.checkpoint import Checkpoints, export
from trainer.config import SftConfig, sizes_table
from trainer.death import Notice
from trainer.health import Health
from trainer.record import read_metrics
from trainer.runs import Run
from trainer.screen import SftScreen
from trainer.tracking import Stopwatch, Tracker
from workers.actor import ActorWorker
from workers.dispatch import from_controller, on_controller
from workers.models.hub import read_tokenizer
from workers.parallel.mesh import make_training_layout


class Demonstrations:
    """Prompts with the responses to imitate; raises ConfigError where the data cannot be used or one is too long."""

    def __init__(self, config: SftConfig, state: dict | None) -> None:
        tokenizer = read_tokenizer(config.model)
        prompts, responses = read_demonstrations(config, tokenizer, config.data, "train")
        self.responses = {prompt.index: response for prompt, response in zip(prompts, responses, strict=True)}
        self.stream = PromptStream(
            prompts, config.samples_per_step, config.seed, config.data.shuffle, "samples_per_step"
        )
        if state is not None:
            self.stream.load_state_dict(state)
        self.held_out: TensorDict | None = None
        sets = config.data.held_out_sets()
        rows = [batch_of_demonstrations(*read_demonstrations(config, tokenizer, sets[n], "eval", n)) for n in sets]
        if rows:
            self.held_out, ranks = concatenate(rows), dist.get_world_size() // config.actor.tensor_parallel
            if len(self.held_out) < ranks:
                few = f"data.eval has {len(self.held_out)} rows, fewer than the {ranks} data-parallel ranks"
                raise ConfigError(f"{few}: give it more, or data.eval=null.")

    def next(self) -> TensorDict:
        """The batch of the next step, with tokens, response_mask and loss_weights, each [B, *]."""
        prompts = self.stream.next()
        batch = batch_of_demonstrations(prompts, [self.responses[prompt.index] for prompt in prompts])
        return weigh_tokens(batch, AlgorithmConfig(aggregate="token_mean"))


def read_demonstrations(
    config: SftConfig, tokenizer: PreTrainedTokenizerBase, data: DataConfig, split: str, name: str = ""
) -> tuple[list[Prompt], list[list[int]]]:
    """The prompts of `split`, of the held-out set `name`, and their responses; raises as Demonstrations."""
    key = f"data.{split}.{name}".removesuffix(".")
    prompts = list(load_prompts(data, tokenizer, split, key, demonstrations=True))
    try:
        responses = tokenize_responses(prompts, tokenizer, data)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    longest = max(len(prompt.tokens) + len(response) for prompt, response in zip(prompts, responses, strict=True))
    config.check_length(longest, f"the longest demonstration of {key}")
    return prompts, responses


def batch_of_demonstrations(prompts: Sequence[Prompt], responses: Sequence[list[int]]) -> TensorDict:
    """Tokens and response_mask, [B, *] each."""
    pairs = list(zip(prompts, responses, strict=True))
    tokens = [torch.tensor(prompt.tokens + response) for prompt, response in pairs]
    mask = [torch.arange(len(row)) >= len(prompt.tokens) for row, (prompt, _) in zip(tokens, pairs, strict=True)]
    return make_batch({"tokens": jagged(tokens), "response_mask": jagged(mask)})


def run_sft(config: SftConfig, device: torch.device, run: Run, notice: Notice) -> None:
    """Train the policy to imitate `data.response_column`, and leave it as a Hugging Face folder, RUN/model."""
    checkpoints, watch = Checkpoints(run.folder, config, notice), Stopwatch(device.type == "cuda")
    with ExitStack() as stack:

        def begin() -> tuple[Demonstrations, Tracker]:
            data = Demonstrations(config, run.data)
            config.count_steps(len(data.stream.prompts), config.samples_per_step)
            run.check_unfinished(config.steps)
            said = run.begin()
            place = config.tracking, run.folder, config.steps, without_secrets(config), run.step
            tracker = stack.enter_context(Tracker(*place, SftScreen))
            (run.folder / "config.yaml").write_text(to_yaml(config))
            tracker.say(said)
            tracker.say(sizes_table(config, dist.get_world_size()))
            notice.say = tracker.say
            return data, tracker

        data, tracker = on_controller(begin) or (None, None)
        config.steps = from_controller(config.steps)
        layout = make_training_layout(device, config.actor.replicate, config.actor.tensor_parallel)
        actor = ActorWorker(config.model, config.actor, AlgorithmConfig(), layout, 1.0, config.steps)
        if (said := checkpoints.begin(actor)) and tracker:
            tracker.say(said)
        if run.resumed is not None:
            checkpoints.load(run.resumed, actor)

        def evaluate() -> dict[str, float]:
            if not config.data.eval:
                return {}
            with watch("evaluation"):
                batch = actor.compute_logprobs(data.held_out if tracker else None)
            if not tracker:
                return {}
            logprobs, mask = (batch[name].values() for name in ("old_logprobs", "response_mask"))
            return {"eval/loss": -float(logprobs[mask].double().mean())}

        if run.step == 0 and (before := evaluate()):
            tracker.log(0, before | watch.metrics())
        notice.stepping, health = True, Health(tracker, run.folder, config.actor.skipped_limit)
        for step in range(run.step + 1, config.steps + 1):
            with watch("step"):
                batch = data.next() if tracker else None
                metrics = actor.sft_update(batch)
            if config.is_due(step, config.evaluation.every):
                metrics |= evaluate()
            times = watch.metrics()
            on_controller(lambda step=step, metrics=metrics | times, batch=batch: health.record(step, metrics, batch))
            if checkpoints.wanted(step, metrics):
                checkpoints.save(step, actor, data.stream.state_dict() if tracker else None)
        if tracker is not None:
            export(run.folder, run.folder / "model")
            said = f"The policy is in {run.folder / 'model'}, an ordinary Hugging Face folder."
            if losses := [row["eval/loss"] for row in read_metrics(run.folder) if "eval/loss" in row]:
                said += f" Its loss on data.eval went from {losses[0]:.4f} to {losses[-1]:.4f}."
            tracker.say(said)
