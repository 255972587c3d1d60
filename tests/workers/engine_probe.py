"""Run by test_sglang.py and test_gpu_sglang.py under torchrun: the real SGLang behind every training layout.

    torchrun --nproc-per-node N -m tests.workers.engine_probe MODEL OUT DEVICE DTYPE ENGINE_TP,... REPLICATE-TENSOR,...

starts an engine for each ENGINE_TP, gives it two rounds of weights from an actor on each layout, and leaves
OUT/PARTS-TENSOR-rREPLICATE-eENGINE_TP.pt with what the controller saw; where engine and actor are cut alike, it has two
more of conversations, in -turns.pt. At last each rank starts a process that is not SGLang's, and leaves its number in
OUT/bystander-RANK.
"""

import dataclasses
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

import workers.sharding
from environments import EnvironmentsConfig
from examples.countdown import make_tokenizer
from grpo.advantages import compute_advantages
from grpo.algorithm import AlgorithmConfig
from grpo.conversation import Dialogue
from grpo.data_config import DataConfig
from tests.workers.conftest import prompts_of
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.conversation import Cast, Converser
from workers.engines.config import RolloutConfig
from workers.engines.protocol import Bucket, Engine
from workers.parallel import mesh
from workers.rollout import RolloutWorker, make_engine
from workers.sharding import ShardingManager, expect_current

TEMPERATURE = 0.8
PROMPTS = [list(range(2, 6 + i)) for i in range(8)]
STOP = (1,)


def assert_converses(result: dict, engines: int, gap: float) -> None:
    """What must hold of -turns.pt: what SGLang was sent stands in the batch before each turn; both agree."""
    for version, rollout in enumerate((result["first"], result["second"])):
        assert rollout["versions"] == [version]
        assert rollout["gap"] <= gap
        begins = []  # of each sample, what stands before each of its turns
        for row, mask in zip(*(rollout["samples"][name].unbind() for name in ("tokens", "response_mask")), strict=True):
            row, mask = row.tolist(), mask.tolist()
            begins.append([tuple(row[:i]) for i in range(1, len(row)) if mask[i] and not mask[i - 1]])
        assert [begin[0] for begin in begins] == [tuple(prompt) for prompt in PROMPTS for _ in range(4)]
        assert {len(begin) for begin in begins} <= {1, 2, 3, 4}
        assert sum(map(len, begins)) > 2 * len(begins)
        assert len(rollout["asked"]) == engines
        assert all(rollout["asked"])  # every engine had its part
        assert set().union(*rollout["asked"]) == {turn for begin in begins for turn in begin}


def asked_of(engine: Engine) -> set[tuple[int, ...]]:
    """Becomes the ids of every request that SGLang itself is sent from now on; empty where it is not led."""
    asked = set()
    if engine.process is not None:
        manager = engine.process.engine.tokenizer_manager
        dispatch = manager._dispatch_to_scheduler

        def noted(message):
            asked.update(tuple(request.input_ids) for request in getattr(message, "batch", []))
            dispatch(message)

        manager._dispatch_to_scheduler = noted
    return asked


def rollout(sharding: ShardingManager, asked: set) -> dict:
    """One rollout of 4 samples a prompt, and how far its log-probabilities are from the actor's own."""
    prompts = None
    if mesh.is_controller():  # a number for the environment to think of
        prompts = [dataclasses.replace(prompt, row={"number": prompt.index}) for prompt in prompts_of(*PROMPTS)]
    asked.clear()
    if cuda := sharding.actor.layout.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with sharding.serving():
        beyond = torch.cuda.max_memory_allocated() - before if cuda else 0
        samples = sharding.rollout.generate(prompts, 4)
    expect_current(samples, sharding.actor.version)
    samples = sharding.actor.compute_logprobs(samples)
    result = {"held": samples}
    samples = sharding.actor.group.fetch(samples, "the tokens of the probe")
    result |= {"samples": samples, "sync": dict(sharding.metrics), "beyond": beyond}
    result["asked"] = sharding.rollout.group.collect(set(asked), "what the engines were asked")
    if samples is None:
        return result
    mask = samples["response_mask"].values()
    gaps = (samples["old_logprobs"].values() - samples["rollout_logprobs"].values())[mask].abs()
    rows = zip(samples["tokens"].unbind(), samples["response_mask"].unbind(), strict=True)
    result |= {"gap": float(gaps.mean()), "versions": samples["newest_version"].unique().tolist()}
    return result | {"prompts": [row[~mask].tolist() for row, mask in rows]}


def learn(sharding: ShardingManager, samples) -> None:
    """One step that changes the weights."""
    if samples is not None:
        samples["rewards"] = torch.tensor([1.0, -1.0]).repeat(len(samples) // 2)
    sharding.actor.update(compute_advantages(samples, AlgorithmConfig()))


def two_rounds(model: ModelConfig, worker: RolloutWorker, layout: mesh.TrainingLayout, asked: set) -> dict:
    actor = ActorWorker(model, ActorConfig(learning_rate=1e-3), AlgorithmConfig(), layout, TEMPERATURE, 10)
    workers.sharding.BUCKET_BYTES = 2**20 if layout.device.type == "cpu" else 2**26  # so that there are several
    sharding = ShardingManager(actor, worker)
    first = rollout(sharding, asked)
    before = [Bucket(bucket.flat.clone(), bucket.shapes) for bucket in sharding.weights()]
    learn(sharding, first.pop("held"))
    second = rollout(sharding, asked)
    del second["held"]
    # What the engine was given before the update is not what it holds now.
    said, engine = "", worker.engine
    engine.wake_weights()
    if engine.holds_weights:
        try:
            engine.verify(before)
        except RuntimeError as error:
            said = str(error)
    engine.sleep(())
    return {"first": first, "second": second, "verify_of_old_weights": said, "verified": sharding.verified}


def main() -> None:
    folder, out, device, dtype, engine_sizes, layouts = sys.argv[1:]
    device = mesh.pick_device(device)
    mesh.join(device, 300.0)
    model = ModelConfig(path=folder, dtype=dtype)
    settings = {"temperature": TEMPERATURE, "max_response_tokens": 48, "memory_fraction": 0.3}
    settings |= {"engine": "sglang", "release": "kv", "verify_every": 1}
    # One prompt at a time on a CPU, so that the engines have something to hand out.
    settings |= {"concurrent_samples": 4 if device.type == "cpu" else 64}
    settings |= {"sglang": {} if device.type == "cpu" else {"attention_backend": "triton"}}
    cast = Cast("guess", None, Dialogue(make_tokenizer(), DataConfig(), STOP))
    # Late is what an idle process can be on a machine with little memory, and nothing that is tested here.
    limits = EnvironmentsConfig(processes=1, max_turns=4, max_turn_tokens=6, timeout_seconds=60.0)
    for size in map(int, engine_sizes.split(",")):
        config, engines = RolloutConfig(tensor_parallel=size, **settings), mesh.make_inference_layout(device, size)
        engine = make_engine(model, config, engines, seed=engines.dp_rank, turns=True)
        asked = asked_of(engine)
        with ExitStack() as stack:
            converse = stack.enter_context(Converser(cast, limits, config)) if engines.tp_rank == 0 else None
            for cut in layouts.split(","):
                replicate, tensor = map(int, cut.split("-"))
                layout = mesh.make_training_layout(device, replicate, tensor)
                for what, held in [("", None), ("-turns", converse)][: 1 + (tensor == size)]:
                    worker = RolloutWorker(config, engine, engines, STOP, seed=3, converse=held)
                    result = two_rounds(model, worker, layout, asked)
                    if mesh.is_controller():
                        torch.save(result, Path(out) / f"{layout.dp_size}-{tensor}-r{replicate}-e{size}{what}.pt")
        engine.shutdown()
    bystander = subprocess.Popen(["sleep", "60"])
    Path(out, f"bystander-{dist.get_rank()}").write_text(str(bystander.pid))
    mesh.leave()


if __name__ == "__main__":
    main()
