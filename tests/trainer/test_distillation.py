"""On-policy distillation: what a teacher makes of advantages, that a policy learns it, which teachers are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken

from examples.countdown import make_model, make_tokenizer
from tests.trainer.conftest import assert_rows_close, deterministic, rows_of
from trainer.trainer import Trainer
from workers.actor import ActorWorker

ALONE = ["rewards.weights={digits: 0, countdown: 0}", "data.eval=null"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A model of another family and other sizes than the policy, whose vocabulary has two rows more."""
    folder = tmp_path_factory.mktemp("teacher")
    make_model("llama", hidden=48, layers=3, vocab=120, tied=False, seed=5).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def batches(monkeypatch) -> list:
    """What the actor of the runs to come is given to learn from, a batch each step."""
    seen, update = [], ActorWorker.update

    def watched(self, batch):
        seen.append(batch.copy())
        return update(self, batch)

    monkeypatch.setattr(ActorWorker, "update", watched)
    return seen


@pytest.mark.parametrize(
    "more", [["actor.offload=[reference]"], ["actor.lora.rank=4"], ["algorithm.kl_coefficient=0.1"]]
)
def test_a_token_is_worth_less_by_what_the_teacher_thinks_less_of_it(more, start, teacher, batches):
    settings = [f"algorithm.teacher={teacher}", "algorithm.teacher_coefficient=0.5", "rollout.temperature=0.7", *more]
    rows = rows_of(start("train", "alone", *ALONE, *settings))
    alone = list(batches)
    batches.clear()
    start("train", "beside", "data.eval=null", "steps=1", *settings)
    start("train", "rewards", "data.eval=null", "steps=1", "rollout.temperature=0.7")
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for batch, row in zip(alone, rows, strict=True):
        apart = []
        for i, tokens in enumerate(batch["tokens"].unbind()):
            mask, old, its, worth = (
                batch[name].unbind()[i] for name in ("response_mask", "old_logprobs", "teacher_logprobs", "advantages")
            )
            with torch.no_grad():
                logprobs = (model(tokens[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, tokens[1:, None])
            torch.testing.assert_close(its[mask], logprobs[:, 0][mask[1:]], rtol=0, atol=1e-5)
            torch.testing.assert_close(worth[mask], -0.5 * (old - its)[mask])
            assert not worth[~mask].any()
            apart.append((old - its)[mask])
        assert row["teacher/kl"] == pytest.approx(float(torch.cat(apart).mean()), rel=1e-5) != 0
        assert row["groups/no_signal"] == 1
    # Beside rewards: what these alone are worth, and the teacher's part.
    both, rewards = (batch["advantages"].values() for batch in batches)
    assert torch.equal(batches[0]["tokens"].values(), batches[1]["tokens"].values())
    torch.testing.assert_close(both, rewards + alone[0]["advantages"].values())
    assert rewards.any()


def test_a_policy_learns_nothing_from_itself(start, countdown):
    rows = rows_of(start("train", "run", *ALONE, f"algorithm.teacher={countdown / 'model'}", "steps=3"))
    for row in rows:
        assert row["teacher/kl"] == row["advantages/min"] == row["advantages/max"] == row["grad_norm"] == 0


def test_a_policy_comes_nearer_to_its_teacher(start, teacher):
    settings = [f"algorithm.teacher={teacher}", "algorithm.aggregate=token_mean", "actor.learning_rate=0.01"]
    rows = rows_of(start("train", "run", *ALONE, *settings, "batch.samples_per_prompt=16", "steps=10"))
    apart = [row["teacher/kl"] for row in rows]
    assert sum(apart[-3:]) < 0.7 * sum(apart[:3])


def test_one_sample_of_a_prompt_is_enough_where_no_group_is_compared(start, teacher):
    settings = [f"algorithm.teacher={teacher}", "batch.samples_per_prompt=1", "algorithm.baseline=none"]
    rows = rows_of(start("train", "run", *ALONE, *settings, "algorithm.scale=none"))
    assert all(row["grad_norm"] > 0 for row in rows)


def _without_gaps(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith("rollout/")}


@pytest.mark.parametrize("layout", ["actor.tensor_parallel=1", "actor.tensor_parallel=2"])
def test_two_processes_learn_from_a_teacher_as_one_does(layout, start, settings, teacher, tmp_path):
    more = [f"algorithm.teacher={teacher}", "data.eval=null"]
    one = start("train", "one", *more)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer"]
    command += ["train", *settings["train"], *more, layout, f"tracking.folder={tmp_path}", "tracking.name=two"]
    root, alone = Path(__file__).parents[2], {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=os.environ | alone, cwd=root)
    both = (deterministic(rows_of(run)) for run in (tmp_path / "two", one))
    # How rounding follows the log-probabilities is rounding.
    assert_rows_close(*([_without_gaps(row) for row in rows] for rows in both), relative=1e-4)


def test_a_resumed_run_goes_on_with_its_teacher(start, teacher):
    settings = [*ALONE, f"algorithm.teacher={teacher}", "batch.minibatches_per_step=2"]
    whole = start("train", "whole", *settings, "steps=4")
    start("train", "parts", *settings, "steps=2")
    parts = start("train", "parts", *settings, "steps=4", "checkpoint.resume=true")
    assert deterministic(rows_of(parts)) == deterministic(rows_of(whole))


def test_a_run_names_its_teacher_and_is_evaluated_and_exported_without_it(start, run_main, tmp_path, capsys):
    make_model("llama", layers=1, seed=5).save_pretrained(tmp_path / "gone")
    make_tokenizer().save_pretrained(tmp_path / "gone")
    run = start("train", "run", f"algorithm.teacher={tmp_path / 'gone'}", "steps=1")
    assert f"taught by {tmp_path / 'gone'}" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    assert run_main("eval", run) == 0
    assert run_main("export", run, tmp_path / "out") == 0
    assert f"| algorithm | grpo, taught by {tmp_path / 'gone'} |" in (tmp_path / "out/README.md").read_text()


def test_an_update_with_a_teacher_can_be_proven(start, settings, run_main, teacher, tmp_path, capsys):
    given = [*settings["prove"], *ALONE, f"algorithm.teacher={teacher}", f"tracking.folder={tmp_path}"]
    assert run_main("prove", *given) == 0
    assert "All of it holds." in capsys.readouterr().out


# refusals


@pytest.fixture
def refusal(run_main, settings, tmp_path, monkeypatch, capsys):
    """refusal(teacher, *overrides) is the one sentence that a run with this teacher is refused with."""
    monkeypatch.chdir(tmp_path)

    def unexpected(*_, **__):
        raise AssertionError("something was begun")

    monkeypatch.setattr(Trainer, "__init__", unexpected)

    def run(teacher: object, *overrides: str) -> str:
        given = [f"tracking.folder={tmp_path}", "tracking.name=run", f"algorithm.teacher={teacher}", *overrides]
        assert run_main("train", *settings["train"], *given) == 2
        error = capsys.readouterr().err
        assert error.count("error:") == error.count("\n") == 1, error
        return error.removeprefix("error: ").strip()

    return run


def test_a_teacher_that_is_not_there_or_damaged_is_refused(refusal, teacher, tmp_path):
    begins = "The teacher cannot be used: algorithm.teacher="
    assert refusal("./nowhere").startswith(f"{begins}./nowhere is not a folder")
    make_model(layers=1).save_pretrained("mute")
    assert refusal("./mute").startswith(f"{begins}./mute has no tokenizer")
    make_model(layers=1).save_pretrained("damaged")
    make_tokenizer().save_pretrained("damaged")
    file = Path("damaged/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert "damaged/model.safetensors is damaged or cut off" in refusal("./damaged")


def test_a_teacher_of_another_tokenizer_is_refused_with_what_differs(refusal, tmp_path):
    make_model(layers=1, vocab=121).save_pretrained("other")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("maybe"), AddedToken("never")])
    tokenizer.save_pretrained("other")
    said = refusal("./other")
    assert (
        "2 tokens of algorithm.teacher=./other are others, such as 'maybe', id 118 there and none for the policy: use"
        in said
    )
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<pad>"
    tokenizer.save_pretrained("other")
    assert "./other has the eos_token '<pad>', and the policy '<eos>'" in refusal("./other")
    make_tokenizer().save_pretrained("other")
    make_model(layers=1, vocab=117).save_pretrained("other")
    assert "./other has vocab_size=117, and the policy samples of 118" in refusal("./other")


def test_a_teacher_that_does_not_fit_the_run_is_refused(refusal, teacher, monkeypatch):
    long = ["rollout.max_response_tokens=400", "actor.max_tokens_per_microbatch=1000"]
    model = make_model(layers=1)
    model.config.max_position_embeddings = 256
    model.save_pretrained("short")
    make_tokenizer().save_pretrained("short")
    assert "a sample may have 416 tokens, more than its 256 positions: lower data." in refusal("./short", *long)
    make_model(layers=1, heads=3, kv_heads=3).save_pretrained("odd")
    make_tokenizer().save_pretrained("odd")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    said = refusal("./odd", "actor.tensor_parallel=2")
    assert said.startswith("The teacher cannot be used: actor.tensor_parallel=2 does not divide the model's num_att")


@pytest.mark.parametrize("setting", ["mask_no_signal=true", "resample_rounds=2"])
def test_without_rewards_no_group_is_given_up_for_equal_ones(setting, refusal, teacher, start, monkeypatch):
    weights = ALONE[0]
    said = refusal(teacher, weights, f"algorithm.{setting}")
    assert said.startswith(f"algorithm.{setting.replace('true', 'True')} gives up groups of equal rewards")
    assert "algorithm.signal_reward" in said
    with pytest.raises(AssertionError, match="begun"):
        refusal(teacher, weights, f"algorithm.{setting}", "algorithm.signal_reward=digits")


# memory


def test_the_plan_of_a_run_has_the_teachers_phase(start, teacher, capsys):
    start("train", "run", *ALONE, f"algorithm.teacher={teacher}", "steps=1")
    out = capsys.readouterr().out
    heads = next(line.split() for line in out.splitlines() if line.split()[:2] == ["rest", "sync"])
    assert heads == ["rest", "sync", "rollout", "teacher", "old_logprobs", "update"]
