"""What conversations cost beside single answers of as many tokens: the same engine, in turns.

    python -m benchmarks.conversations                          # 1.5B shape on one GPU, 512 x 4 turns of 128 tokens
    python -m benchmarks.conversations engine=torch shape=tiny device=cpu prompts=8 turn=16       # anywhere, in seconds

Both sample turns x turn tokens, all of them, and end with as long a context: a single answer's prompt is longer by what
the environment says in a conversation. Each round has other prompts, which no cache knows.
"""

import resource
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers
import torch
import transformers

from benchmarks import read, shapes
from benchmarks.shapes import make, random_prompts
from environments import EnvironmentsConfig, validate
from grpo.algorithm import AlgorithmConfig
from grpo.config import option
from grpo.conversation import Dialogue
from grpo.data_config import DataConfig
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.conversation import Cast, Converser
from workers.engines.config import RolloutConfig
from workers.parallel.mesh import join, leave, make_inference_layout, make_training_layout, pick_device
from workers.rollout import RolloutWorker, make_engine
from workers.sharding import ShardingManager


@dataclass
class Settings(shapes.EngineSettings):
    engine: str = option("sglang", "sglang or torch", choices=("sglang", "torch"))
    prompts: int = option(64, "in a rollout")
    samples: int = option(8, "for each prompt")
    prompt: int = option(128, "tokens of each prompt")
    turns: int = option(4, "of the policy in a conversation")
    turn: int = option(128, "tokens of each turn")
    observation: int = option(8, "tokens that the environment says to a turn")
    milliseconds: int = option(50, "that a step of the environment takes")
    processes: int = option(2, "that environments run in")
    rounds: int = option(4, "measured ones, after one that is not")


SLOW = """
import time
from environments import register

@register("slow")
class Slow:
    def __init__(self, seconds: float, says: str) -> None:
        self.seconds, self.says = seconds, says

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self.seconds)
        return self.says, 0.0, False
"""


def make_tokenizer(vocabulary: int) -> transformers.PreTrainedTokenizerBase:
    """A word for each id."""
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


def make_converser(settings: Settings, rollout: RolloutConfig) -> Converser:
    """Holds conversations with an environment that takes its time and never ends one."""
    file = Path(settings.folder) / "slow.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SLOW)
    says = " ".join(["w1"] * settings.observation)
    config = EnvironmentsConfig(
        files=[str(file)],
        options={"slow": {"seconds": settings.milliseconds / 1000, "says": says}},
        max_turns=settings.turns,
        max_turn_tokens=settings.turn,
        processes=settings.processes,
    )
    validate(config, "slow")
    tokenizer = make_tokenizer(shapes.SHAPES[settings.shape][5])
    return Converser(Cast("slow", None, Dialogue(tokenizer, DataConfig(), ())), config, rollout)


def main() -> None:
    settings = read(Settings, sys.argv[1:])
    device = pick_device(settings.device)
    join(device, 300.0)
    model = ModelConfig(path=make(settings.shape, Path(settings.folder), device))
    sampled, heard = settings.turns * settings.turn, (settings.turns - 1) * settings.observation
    single = RolloutConfig(
        engine=settings.engine,
        max_response_tokens=sampled,
        concurrent_samples=settings.prompts * settings.samples,
        memory_fraction=settings.memory_fraction,
        release="none",
        sglang=settings.options,
    )
    single.check(1, 1)
    layout, engines = make_training_layout(device), make_inference_layout(device)
    engine = make_engine(model, single, engines, seed=0, turns=True)
    actor = ActorWorker(model, ActorConfig(), AlgorithmConfig(), layout, 1.0, 10)
    worker = RolloutWorker(single, engine, engines, (), seed=0)
    sharding = ShardingManager(actor, worker)
    random = torch.Generator().manual_seed(0)
    several = replace(single, max_response_tokens=sampled + heard + 1)
    seconds: dict[str, list[float]] = {"single answers": [], "conversations": []}
    own: dict[str, list[float]] = {name: [] for name in seconds}
    with make_converser(settings, several) as converser:
        kinds = (single, None, settings.prompt + heard), (several, converser, settings.prompt)
        for _ in range(settings.rounds + 1):
            for name, (worker.config, worker.converse, prompt) in zip(seconds, kinds, strict=True):
                prompts = random_prompts(settings.shape, settings.prompts, prompt, random)
                with sharding.serving():
                    begun, worked = time.perf_counter(), time.process_time()
                    batch = worker.generate(prompts, settings.samples)
                    seconds[name].append(time.perf_counter() - begun)
                    own[name].append(time.process_time() - worked)
                rows = settings.prompts * settings.samples
                assert int(batch["response_mask"].values().sum()) == rows * sampled
                assert len(batch["tokens"].values()) == rows * (settings.prompt + heard + sampled)
                assert sum(t.turns != [] for t in worker.trajectories) == (rows if worker.converse else 0)
                assert not any(t.errors for t in worker.trajectories)
    for name, (_, *measured) in seconds.items():
        median, worked = statistics.median(measured), statistics.median(own[name][1:])
        spread, rate = f"{min(measured):.3f} to {max(measured):.3f}", rows * sampled / median
        print(f"{name:14} {median:.3f} s ({spread}), {rate:,.0f} tokens/s, {worked:.2f} s of CPU in this process")
    ratio = statistics.median(s / c for s, c in zip(*(each[1:] for each in seconds.values()), strict=True))
    print(f"throughput of conversations over single answers: {ratio:.3f}")
    print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    engine.shutdown()
    leave()


if __name__ == "__main__":
    main()
