"""Going on: a run that was killed and resumed is the run that was never interrupted; checkpoints become models."""

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from grpo.batch import jagged, make_batch
from tests.trainer.conftest import assert_rows_close, deterministic, rows_of
from trainer.checkpoint import Checkpoints
from workers.parallel.policy import PREFIX

# Everything that has a state of its own: several updates a step, a schedule, a reference, and an order of the data
# whose epochs end after 4 of the 6 steps.
RESTLESS = ["steps=6", "batch.minibatches_per_step=2", "algorithm.kl_coefficient=0.1", "actor.schedule=cosine"]
RESTLESS += ["actor.warmup_updates=2", "evaluation.every=2", "checkpoint.every=2", "tracking.samples_every=1"]

# python -c KILLED WHERE ARGUMENTS: the command line, killed when the second checkpoint, that of step 4, was written or
# renamed.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch.distributed.checkpoint as dcp
from trainer.__main__ import main

def deadly(work):
    def run(*args, **kwargs):
        work(*args, **kwargs)
        path = kwargs.get("checkpoint_id") or args[0]
        calls.extend([path] if path.suffix == ".partial" else [])
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    calls = []
    return run

if sys.argv.pop(1) == "writing":
    dcp.save = deadly(dcp.save)
else:
    Path.rename = deadly(Path.rename)
main()
"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def run_killed(settings, tmp_path):
    """run_killed(where, name, *overrides) runs `train` in a process that kills itself `where`; the run's folder."""

    def run(where: str, name: str, *overrides: str) -> Path:
        given = [*settings["train"], f"tracking.folder={tmp_path}", f"tracking.name={name}", *overrides]
        command = [sys.executable, "-c", KILLED, where, "train", *given]
        environment = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
        assert done.returncode == -signal.SIGKILL, done.stderr
        return tmp_path / name

    return run


@pytest.mark.parametrize("where", ["writing", "renaming"])
def test_a_run_killed_at_a_checkpoint_goes_on_as_if_it_had_not_been(where, start, run_killed, run_main):
    whole = start("train", "whole", *RESTLESS)
    killed = run_killed(where, "killed", *RESTLESS)
    # Whatever a kill leaves behind, a folder under the final name is whole.
    left = {"writing": ["step-00000002", "step-00000004.partial"], "renaming": ["step-00000002", "step-00000004"]}
    assert names_in(killed / "checkpoints") == left[where]
    start("train", "killed", *RESTLESS, "checkpoint.resume=true")

    assert [row["step"] for row in rows_of(killed)] == list(range(7))
    assert deterministic(rows_of(killed)) == deterministic(rows_of(whole))
    assert (killed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    # The newest two are kept, and nothing else.
    assert names_in(killed / "checkpoints") == names_in(whole / "checkpoints") == ["step-00000004", "step-00000006"]
    assert all(run_main("export", run, run / "out") == 0 for run in (whole, killed))
    weights, others = (load_file(run / "out/model.safetensors") for run in (whole, killed))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_supervised_training_goes_on_on_any_layout(start, settings, run_main):
    """Six steps at once, or two and one in this process, two on a pair of tensor-parallel ones, and the last here."""
    whole, parts = start("sft", "whole"), start("sft", "parts", "steps=2")
    start("sft", "parts", "steps=3", "checkpoint.resume=true")
    assert deterministic(rows_of(parts)) == deterministic(rows_of(whole))[:3]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer"]
    command += ["sft", *settings["sft"], f"tracking.folder={parts.parent}", "tracking.name=parts"]
    command += ["steps=5", "actor.tensor_parallel=2", "checkpoint.resume=true"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=environment, cwd=Path(__file__).parents[2])
    start("sft", "parts", "checkpoint.resume=true")
    # Rounding alone sets them apart, where starting Adam or the order of the data again would move every digit.
    assert_rows_close(deterministic(rows_of(parts)), deterministic(rows_of(whole)), relative=1e-4)


@pytest.mark.parametrize("model", ["model", "untied"])
def test_an_export_is_the_policy_for_transformers(model, start, run_main, countdown, tmp_path, monkeypatch, capsys):
    tokens = torch.randint(2, 118, (3, 12), generator=torch.Generator().manual_seed(0))
    batch = make_batch({"tokens": jagged(tokens.unbind()), "response_mask": jagged((tokens > 0).unbind())})
    for mask in batch["response_mask"].unbind():
        mask[0] = False
    seen, save = {}, Checkpoints.save

    def save_and_see(self, step, actor, position):
        weights = {n.removeprefix(PREFIX): p.full_tensor().clone() for n, p in actor.policy.named_parameters()}
        seen[step] = weights, torch.stack(actor.compute_logprobs(batch)["old_logprobs"].unbind())
        save(self, step, actor, position)

    monkeypatch.setattr(Checkpoints, "save", save_and_see)
    run = start("train", "run", f"model.path={countdown / model}", "checkpoint.every=1", "data.eval=null")
    assert not torch.equal(seen[1][1], seen[2][1])
    for step, choice in ((2, []), (1, ["--step", 1])):
        out = tmp_path / f"out{step}"
        assert run_main("export", run, out, *choice) == 0
        weights, expected = seen[step]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert weights.keys() == dict(loaded.named_parameters()).keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in loaded.named_parameters())
        with torch.no_grad():
            logprobs = loaded(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[:, :, 0]
        torch.testing.assert_close(logprobs, expected[:, 1:], rtol=0, atol=1e-6)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer("1 + 2 </think>").input_ids == [3, 102, 4, 115]
        assert tokenizer.eos_token_id == 1
        assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == 1
    capsys.readouterr()
    assert run_main("export", run, tmp_path / "none", "--step", 7) == 2
    error = capsys.readouterr().err
    assert "no checkpoint of step 7: it has those of steps 1, 2." in error
    assert error.count("\n") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_in_another_type_and_in_shards(dtype, start, run_main, tmp_path, countdown):
    run = start("train", "run", "data.eval=null")
    assert run_main("export", run, tmp_path / "whole") == 0
    assert run_main("export", run, tmp_path / "out", "--dtype", dtype, "--shard-size", "20KB") == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    whole = load_file(tmp_path / "whole/model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert dict(loaded.named_parameters()).keys() == whole.keys()
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, whole[name].to(getattr(torch, dtype)))
    # The trainer takes it as a model as well.
    again = start("sft", "again", "steps=1", f"model.path={tmp_path / 'out'}")
    assert (again / "model/README.md").read_text().count("supervised training") == 1


def test_the_model_card_says_what_the_run_did(start, run_main, tmp_path, countdown):
    run = start("train", "run", "evaluation.every=1", "checkpoint.every=1", "algorithm.preset=dr_grpo")
    for step in (1, 2):
        assert run_main("export", run, tmp_path / f"out{step}", "--step", step) == 0
        card = (tmp_path / f"out{step}/README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\n---\n")  # a folder is no base_model of the hub's
        table = [line for line in card.splitlines() if line.startswith("| ")]
        facts = dict(line.strip("| ").split(" | ") for line in table[1:])
        row = rows_of(run)[step]
        assert float(facts["eval/accuracy"]) == pytest.approx(row["eval/accuracy"], rel=1e-5)
        assert float(facts["eval/reward/mean"]) == pytest.approx(row["eval/reward/mean"], rel=1e-5)
        assert facts["evaluated after step"] == str(step)
        assert facts["run"] == f"run, step {step} of 2"
        assert facts["trained from"] == str(countdown / "model")
        assert facts["algorithm"].startswith("dr_grpo")
        assert facts["trained on"] == str(countdown / "train.jsonl")
        assert facts["rewards and weights"] == '{"digits": 1.0, "countdown": 0.5}'
        assert facts["weights"] == "all trained, in float32"
        assert f"grpo-trainer {version('grpo-trainer')}, torch {torch.__version__}" in facts["written by"]
