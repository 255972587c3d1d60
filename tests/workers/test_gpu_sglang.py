"""SGLang on CUDA devices: every training layout of this machine times every engine size, and memory that is short.

bash tests/run.sh -m "gpu and sglang"
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.countdown import make_model
from grpo.algorithm import AlgorithmConfig
from tests.workers.conftest import prompts_of
from tests.workers.engine_probe import PROMPTS, assert_converses
from tests.workers.launch import torchrun
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.engines.config import RolloutConfig
from workers.parallel.mesh import join, make_inference_layout, make_training_layout, pick_device
from workers.rollout import RolloutWorker, make_engine
from workers.sharding import ShardingManager

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.timeout(580)]

SIZES = [size for size in (1, 2, 4) if torch.cuda.device_count() and torch.cuda.device_count() % size == 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    sizes = {"hidden": 1024, "layers": 8, "heads": 16, "kv_heads": 4, "head_dim": 64, "feed_forward": 4096}
    model = make_model("qwen2", vocab=32000, initializer_range=0.02, seed=5, **sizes)
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def probed(folder) -> Path:
    """What engine_probe.py saw on all GPUs of this machine."""
    sizes, layouts = ",".join(map(str, SIZES)), ",".join(f"1-{size}" for size in SIZES)
    arguments = (folder / "model", folder, "cuda", "bfloat16", sizes, layouts)
    torchrun(torch.cuda.device_count(), "engine_probe", *arguments, timeout=560, threads=4)
    return folder


@pytest.mark.parametrize("engine_size", SIZES)
@pytest.mark.parametrize("slices", SIZES)
def test_every_engine_holds_and_uses_the_weights_of_every_layout(probed, slices, engine_size):
    parts = torch.cuda.device_count() // slices
    result = torch.load(probed / f"{parts}-{slices}-r1-e{engine_size}.pt", weights_only=False)
    for version, rollout in enumerate((result["first"], result["second"])):
        print(f"actor {parts} x tp {slices}, engine tp {engine_size}, version {version}: gap {rollout['gap']:.5f}")
        assert rollout["versions"] == [version]
        assert rollout["gap"] <= 0.011
        # Two buckets of the largest weight, and a little for questions: a third, or the whole model, is more.
        assert rollout["beyond"] <= 2.3 * 32000 * 1024 * 2
        assert rollout["sync"]["sync/bytes"] > 4 * 32000 * 1024 * 2
        assert rollout["prompts"] == [prompt for prompt in PROMPTS for _ in range(4)]
    assert result["verified"] == 1
    assert "The engine's weights are not the actor's" in result["verify_of_old_weights"]


@pytest.mark.parametrize("size", SIZES)
def test_every_engine_converses_from_the_very_ids_of_the_batch(probed, size):
    engines = torch.cuda.device_count() // size
    result = torch.load(probed / f"{engines}-{size}-r1-e{size}-turns.pt", weights_only=False)
    assert_converses(result, engines, 0.011)


def test_memory_that_is_short_at_wake_up_is_said_with_a_table_and_a_dead_engine_leaves_none_behind(folder):
    device = pick_device("cuda")
    if dist.is_initialized():
        dist.destroy_process_group()
    join(device, 120.0)
    layout, model = make_training_layout(device), ModelConfig(path=str(folder / "model"))
    free_before = torch.cuda.mem_get_info()[0]
    sizes = {"concurrent_samples": 8, "memory_fraction": 0.3, "max_response_tokens": 16}
    config = RolloutConfig(engine="sglang", release="kv+weights", sglang={"attention_backend": "triton"}, **sizes)
    engines = make_inference_layout(device)
    engine = make_engine(model, config, engines, seed=0)
    actor = ActorWorker(model, ActorConfig(), AlgorithmConfig(), layout, 1.0, 10)
    sharding = ShardingManager(actor, RolloutWorker(config, engine, engines, (1,), seed=0))
    prompts = prompts_of(*[[5, 6, 7]] * 4)
    with sharding.serving():
        assert len(sharding.rollout.generate(prompts, 2)) == 8
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 2**30, dtype=torch.uint8, device=device)
    says = r"The engine needs .* lower rollout.memory_fraction"
    with pytest.raises(MemoryError, match=says) as error, sharding.serving():
        pass
    assert "actor: parameters (this rank's shards)" in str(error.value)
    assert "other tensors of the trainer" in str(error.value)
    del hog
    torch.cuda.empty_cache()
    with sharding.serving():
        assert len(sharding.rollout.generate(prompts, 2)) == 8
    engine.process.kill()
    del sharding, actor
    torch.cuda.empty_cache()
    assert free_before - torch.cuda.mem_get_info()[0] < 2**30
    dist.destroy_process_group()
