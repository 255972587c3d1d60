"""The memory plan of a run: what decides it, how it is shown, and what was measured beside it."""

import pytest
import torch

import trainer.trainer
from grpo.config import load
from tests.trainer.conftest import rows_of, shown
from trainer.config import TrainConfig
from trainer.controller import Controller, job_of, measured_table, plan_table
from workers.memory import Peaks

GIB = 2**30


def words_of(table) -> list[list[str]]:
    return [line.split() for line in shown(table).splitlines()]


@pytest.fixture
def config(settings) -> TrainConfig:
    more = ["batch.prompts_per_step=6", "batch.minibatches_per_step=2", "algorithm.kl_coefficient=0.1"]
    return load(TrainConfig, None, [*settings["train"], *more, "actor.tensor_parallel=2"])


def test_the_settings_become_what_one_rank_deals_with(config):
    job = job_of(config, 4, torch.device("cuda"), 141 * GIB)
    assert (job.dp_shard, job.actor.tensor_parallel) == (2, 2)
    assert job.samples == 6 * 4 // 2 / 2  # samples of an update over two parts
    assert job.rows == 2 * 4  # six prompts over four engines
    assert job.longest == 16 + 12
    assert (job.compute, job.compiled) == (torch.bfloat16, True)
    assert (job.reference, job.off_policy, job.teacher) == (True, True, None)
    config.algorithm.kl_coefficient, config.batch.minibatches_per_step = 0.0, 1
    job = job_of(config, 4, torch.device("cpu"), 141 * GIB)
    assert (job.compute, job.compiled) == (torch.float32, False)
    assert (job.reference, job.off_policy) == (False, False)
    config.algorithm.teacher = config.model.path.replace("/model", "/untied")
    job = job_of(config, 4, torch.device("cpu"), 141 * GIB)
    assert (job.reference, job.off_policy, job.teacher.tie_word_embeddings) == (False, True, False)


def test_the_plan_has_a_column_for_each_phase_and_leaves_out_what_nobody_needs():
    phases = {"rest": {"weights": 2 * GIB, "SGLang": 0, "reference": 0}, "update": {"weights": 2 * GIB, "head": GIB}}
    lines = words_of(plan_table(phases, 10 * GIB))
    heads = lines.index(["rest", "update"])
    assert [word for line in lines[:heads] for word in line][-3:] == ["GiB", "of", "10.0"]
    assert lines[heads + 1 :] == [["weights", "2.0", "2.0"], ["head", "1.0"], ["in", "all", "2.0", "3.0"]]


def test_what_was_measured_stands_beside_the_trainers_own_part_alone():
    phases = {"rest": {"weights": GIB}, "rollout": {"weights": GIB, "SGLang": 9 * GIB}, "ref": {"weights": GIB}}
    table = words_of(measured_table(phases, {"memory/rollout_peak_gib": 1.25, "memory/sync_peak_gib": 3.0}))
    assert table[1:] == [["predicted", "measured"], ["rollout", "1.0", "1.2"]]


def test_a_run_shows_its_plan_first_and_what_it_measured_after_the_second_step(start, monkeypatch, capsys):
    allocated = iter(range(1, 1000))
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: next(allocated) * GIB)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda: 0)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(trainer.trainer, "Peaks", lambda cuda: Peaks(True))
    init = Controller.__init__

    def as_on_cuda(self, config, device, *others):
        init(self, config, device, *others)
        self._plan_memory(device, 10 * GIB)

    monkeypatch.setattr(Controller, "__init__", as_on_cuda)
    rows = rows_of(start("train", "run", "steps=3"))
    names = {f"memory/{name}_peak_gib" for name in ("sync", "rollout", "update")}
    assert all({name for name in row if name.startswith("memory/")} == names for row in rows[1:])
    assert rows[1]["memory/update_peak_gib"] < rows[2]["memory/update_peak_gib"]
    out = capsys.readouterr().out
    out = out[out.index("Attention:") :]  # what comes before is the plan of the host
    assert out.index("Memory predicted, GiB of 10.0") < out.index("It fits.") < out.index("Memory of the trainer, GiB")
    assert out.count("Memory of the trainer, GiB") == 1
    assert "Attention: torch, because the device is not a Hopper GPU." in out
    # `predicted` is nothing beside it: the model is tiny.
    assert ["update", "0.0", f"{rows[2]['memory/update_peak_gib']:.1f}"] in [line.split() for line in out.splitlines()]


def test_on_a_cpu_the_free_memory_of_the_host_is_planned_and_nothing_is_measured(start, monkeypatch, capsys):
    monkeypatch.setattr("trainer.controller.memory_for_each", lambda: 2**20)
    rows = rows_of(start("train", "run", "steps=2"))
    assert not [name for row in rows for name in row if name.startswith("memory/")]
    out = capsys.readouterr().out
    assert (
        out.index("has 0.0 GiB of memory free for each process") < out.index("Memory predicted") < out.index("step 2/2")
    )
    assert "update is predicted to need 0.0 GiB of 0.0 GiB" in out
    assert "GPU" not in out.partition("Memory predicted")[2].partition("step ")[0]
    assert "offload" not in out
    assert "Memory of the trainer" not in out
