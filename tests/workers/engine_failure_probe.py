"""Run by test_sglang.py under torchrun: engines of ENGINE_TP ranks serve, and something happens to the last one.

    torchrun --nproc-per-node N engine_failure_probe.py MODEL LOG kill|stop ENGINE_TP

Prints "HURT" when it does it. `kill` ends the engine's process, `stop` halts it as a deadlock would.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from grpo.algorithm import AlgorithmConfig
from tests.workers.conftest import prompts_of
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.engines.config import RolloutConfig
from workers.parallel.mesh import join, make_inference_layout, make_training_layout, pick_device
from workers.rollout import RolloutWorker, make_engine
from workers.sharding import ShardingManager


def main() -> None:
    folder, log, harm, size = sys.argv[1:]
    device = pick_device("cpu")
    join(device, 300.0)
    rank = dist.get_rank()
    layout, engines = make_training_layout(device), make_inference_layout(device, int(size))
    model = ModelConfig(path=folder)
    config = RolloutConfig(
        engine="sglang",
        tensor_parallel=int(size),
        max_response_tokens=400,
        concurrent_samples=4,
        stall_seconds=10.0 if harm == "stop" else 45.0,
    )
    engine = make_engine(model, config, engines, seed=rank, log=Path(f"{log}-{rank}"))
    actor = ActorWorker(model, ActorConfig(), AlgorithmConfig(), layout, 1.0, 10)
    sharding = ShardingManager(actor, RolloutWorker(config, engine, engines, (), seed=3))

    def hurt() -> None:
        time.sleep(3)
        print("HURT", time.time(), flush=True)
        for process in engine.process.processes:
            os.kill(process.pid, signal.SIGKILL if harm == "kill" else signal.SIGSTOP)

    prompts = prompts_of(*[[5, 6, 7]] * 64) if rank == 0 else None
    with sharding.serving():
        if engines.tp_rank == 0 and engines.dp_rank == engines.dp_size - 1:
            threading.Thread(target=hurt, daemon=True).start()
        sharding.rollout.generate(prompts, 4)
    print("finished without a failure", flush=True)


if __name__ == "__main__":
    main()
