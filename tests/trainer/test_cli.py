"""The command line: what cannot work is refused in one sentence, with exit code 2, before any weights are loaded."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from examples.countdown import make_model, make_tokenizer
from grpo.config import describe
from trainer.__main__ import settings_page
from trainer.config import SftConfig, TrainConfig
from trainer.tracking import Stopwatch
from workers.engines.sglang_process import EngineProcess


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Loading weights fails the test."""

    def refuse(*_, **__):
        raise AssertionError("weights were loaded")

    for name in ("workers.actor.load_policy", "workers.ref.load_policy", "trainer.trainer.make_engine"):
        monkeypatch.setattr(name, refuse)


@pytest.fixture
def refusal(run_main, settings, tmp_path, monkeypatch, capsys):
    """refusal(*overrides) is the one sentence that these settings are refused with."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, command: str = "train", base: bool = True) -> str:
        capsys.readouterr()
        given = [*settings[command], f"tracking.folder={tmp_path}", "tracking.name=run"] if base else []
        assert run_main(command, *given, *arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1, error
        assert error.rstrip().endswith((".", "?"))
        return error

    return run


def assert_names(sentence: str, *words: str) -> None:
    assert [word for word in words if word not in sentence] == [], sentence


@pytest.mark.parametrize("installed", ["0.5.16", "0.5.22", "0.4.9.post2"])
def test_an_sglang_that_was_not_tried_is_refused_with_the_range_and_the_way_out(refusal, monkeypatch, installed):
    monkeypatch.setattr("workers.engines.config.version", lambda _: installed)
    said = refusal("rollout.engine=sglang")
    assert_names(said, f"SGLang {installed}", "0.5.17 up to, but not, 0.5.22", "pip install -e '.[sglang]'")


def test_a_missing_sglang_is_told_with_the_line_that_installs_it_or_the_python_it_is_for(refusal, monkeypatch):
    monkeypatch.setattr("workers.engines.config.version", lambda _: version("no-such-package"))
    for python, words in (((3, 12), "use pip install -e '.[sglang]'"), ((3, 13), "nothing for a Python past 3.12")):
        monkeypatch.setattr("workers.engines.config.sys", SimpleNamespace(version_info=python))
        assert_names(refusal("rollout.engine=sglang"), "which is not installed", words)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_what_can_work_gets_as_far_as_loading_weights(command, run_main, settings, tmp_path):
    with pytest.raises(AssertionError, match="weights were loaded"):
        run_main(command, *settings[command], f"tracking.folder={tmp_path}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor.learning_rat=1"], ["actor.learning_rat", "actor.learning_rate"]),
        (["actor.learning_rate=fast"], ["actor.learning_rate", "fast"]),
        (["steps=0"], ["steps=0", "at least 1"]),
        (["algorithm.prompts_per_step=4"], ["algorithm.prompts_per_step in", "is called batch.prompts_per_step now"]),
        (["algorithm.samples_per_prompt=4"], ["is called batch.samples_per_prompt now"]),
        (["algorithm.minibatches_per_step=1"], ["is called batch.minibatches_per_step now"]),
        (["algorithm.epochs_per_step=1"], ["is called batch.epochs_per_step now"]),
        (["actor.final_learning_rate=0.1"], ["is called actor.final_learning_rate_ratio now"]),
        (["rollout.min_response_tokens=1"], ["rollout.min_response_tokens in", "is gone", "leave it out"]),
        (["rollout.bucket_megabytes=64"], ["rollout.bucket_megabytes in", "is gone", "512 MiB"]),
        (["batch.minibatches_per_step=3"], ["minibatches_per_step=3", "prompts_per_step=4", "divisor"]),
        (["batch.samples_per_prompt=1"], ["batch.samples_per_prompt=1", "algorithm.baseline=group_mean"]),
        (["algorithm.preset=gpso"], ["algorithm.preset='gpso'", "did you mean gspo"]),
        (["algorithm.preset=cispo", "algorithm.dual_clip=9"], ["algorithm.dual_clip=9", "algorithm.clip=cispo"]),
        (["algorithm.clip_low=-0.1"], ["algorithm.clip_low=-0.1", "at least 0 and at most 1"]),
        (["batch.prompts_per_step=20"], ["batch.prompts_per_step=20", "16 prompts", "between 1 and 16"]),
        (["data.prompt_column=question"], ["data.prompt_column", "question", "prompt, numbers, target"]),
        (["data.template='{numbrs} to {target}'"], ["data.template", "numbrs", "did you mean numbers"]),
        (["data.max_prompt_tokens=4"], ["row 0", "6 tokens", "data.max_prompt_tokens is 4", "drop"]),
        (["actor.max_tokens_per_microbatch=20"], ["28 tokens", "max_tokens_per_microbatch=20", "at least 28"]),
        (
            ["rollout.max_response_tokens=600", "actor.max_tokens_per_microbatch=1000"],
            ["616 tokens", "512 positions", "lower"],
        ),
        (["rewards.weights={countdwn: 1}"], ["countdwn", "nearest is 'countdown'"]),
        (["rewards.weights.math=1"], ["'math'", "'answer'", "prompt, numbers, target"]),
        (["evaluation.accuracy=math"], ["evaluation.accuracy=math", "countdown"]),
        (["rollout.engine=vllm"], ["rollout.engine='vllm'", "torch"]),
        (["rollout.engine=sglang"], ["rollout.engine=sglang", "not installed"]),
        (["rollout.tensor_parallel=2"], ["rollout.tensor_parallel", "rollout.engine=sglang"]),
        (["rollout.engine=sglang", "rollout.tensor_parallel=2"], ["rollout.tensor_parallel=2", "1 process(es)"]),
        (["rollout.sglang={attention_backend: triton}"], ["rollout.sglang", "rollout.engine=sglang"]),
        (["model.dtype=float64"], ["model.dtype='float64'", "auto, bfloat16, float32"]),
        (["model.attention=flash"], ["model.attention='flash'", "auto, torch, flash4"]),
        (["model.attention=flash4", "device=cpu"], ["model.attention=flash4", "not a Hopper GPU", "Use auto or torch"]),
        (["rollout.release=everything"], ["rollout.release='everything'", "kv+weights"]),
        (["rollout.memory_fraction=1.5"], ["rollout.memory_fraction=1.5"]),
        (["rollout.stop=[a, '']"], ["rollout.stop holds ''", "leave it out"]),
        (['rollout.stop=["\\ufffd"]'], ["rollout.stop holds", "leave it out"]),
        (["rollout.gap_warning=0.9"], ["rollout.gap_warning=0.9", "rollout.gap_error=0.5"]),
        (["rollout.verify_every=-1"], ["rollout.verify_every=-1"]),
        (["rollout.stall_seconds=0"], ["rollout.stall_seconds=0"]),
        (["actor.offload=[gradients]"], ["actor.offload='gradients'", "optimizer, parameters, reference"]),
        (["checkpoint.resume=true", "tracking.name=null"], ["checkpoint.resume", "tracking.name"]),
        (["model.path=./nowhere"], ["model.path=./nowhere", "not a folder"]),
        (["model.path=null"], ["model.path"]),
        (["device=tpu"], ["device='tpu'", "cpu"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_setting_that_cannot_work(overrides, words, refusal):
    assert_names(refusal(*overrides), *words)


def test_no_reward(refusal, settings):
    without = [setting for setting in settings["train"] if not setting.startswith("rewards.weights")]
    assert_names(refusal(*without, base=False), "rewards.weights", "at least one")


@pytest.mark.parametrize(
    ("processes", "overrides", "words"),
    [
        (3, ["actor.tensor_parallel=2"], ["3 process(es)", "actor.tensor_parallel=2", "a multiple of 2"]),
        (6, ["actor.tensor_parallel=2", "actor.replicate=2"], ["actor.replicate=2", "a multiple of 4"]),
        (4, ["actor.tensor_parallel=4"], ["actor.tensor_parallel=4", "num_key_value_heads=2", "divisor"]),
        (8, [], ["batch.prompts_per_step=4", "8", "at least 8"]),
    ],
)
def test_sizes_that_do_not_fit_the_processes(processes, overrides, words, refusal, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert_names(refusal(*overrides), *words)


def test_tensor_parallelism_that_does_not_divide_the_vocabulary(refusal, tmp_path, monkeypatch):
    make_model(vocab=117).save_pretrained(tmp_path / "odd")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_names(refusal("model.path=./odd", "actor.tensor_parallel=2"), "tensor_parallel=2", "vocab_size=117")


def test_model_folders_that_cannot_be_used(refusal, tmp_path):
    transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1).save_pretrained(tmp_path / "gpt2")
    assert_names(refusal("model.path=./gpt2"), "./gpt2", "'gpt2'", "not supported", "qwen2, qwen3, llama")
    make_model(layers=1).save_pretrained(tmp_path / "mute")
    assert_names(refusal("model.path=./mute"), "./mute", "no tokenizer", "save_pretrained")
    (tmp_path / "empty").mkdir()
    assert_names(refusal("model.path=./empty"), "./empty", "no config")


def damaged(folder: Path, how: str) -> Path:
    """A model of one layer in `folder`, damaged."""
    make_model(layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "header":
        file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    elif how == "shard":
        names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    elif how == "weight":
        weights = load_file(file)
        del weights["model.norm.weight"], weights["model.layers.0.mlp.up_proj.weight"]
        save_file(weights, file)
    else:
        settings = json.loads((folder / "config.json").read_text())
        change = {"shape": {"intermediate_size": 99}, "quantized": {"quantization_config": {"quant_method": "awq"}}}
        (folder / "config.json").write_text(json.dumps(settings | change[how]))
    return folder


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", ["model.safetensors is damaged or cut off", "copy or download"]),
        ("header", ["model.safetensors is damaged or cut off", "copy or download"]),
        ("shard", ["lacks model-00002-of-00002.safetensors", "model.safetensors.index.json", "copy or download"]),
        ("weight", ["no weight model.layers.0.mlp.up_proj.weight", "2 of ", "save_pretrained"]),
        ("shape", ["model.layers.0.mlp.gate_proj.weight has the shape (192, 64)", "by config.json (99, 64)"]),
        ("quantized", ["is quantized (awq)", "use the folder that it was made from"]),
    ],
)
def test_weights_that_cannot_be_used(how, words, refusal, tmp_path):
    assert_names(refusal(f"model.path={damaged(tmp_path / 'broken', how)}"), str(tmp_path / "broken"), *words)


@pytest.mark.parametrize(
    ("files", "path", "words"),
    [
        ({"x.gguf": ""}, "other", ["is a GGUF", "pip install gguf", "from_pretrained('other', gguf_file='x.gguf')"]),
        ({"x.gguf": ""}, "other/x.gguf", ["is a GGUF", "from_pretrained('other', gguf_file='x.gguf')"]),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "other", ["no *.safetensors", "from_pretrained('other')"]),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "some/base"}', "adapter_model.safetensors": ""},
            "other",
            ["an adapter of some/base", "from_pretrained('other').merge_and_unload().save_pretrained('OUT')"],
        ),
        ({"checkpoints/step-1/progress.json": ""}, "other", ["of a run", "python -m trainer export RUN OUT"]),
        ({"checkpoints/step-1/progress.json": ""}, "other/checkpoints/step-1", ["of a run", "export RUN OUT"]),
        ({"model.safetensors": ""}, "other/model.safetensors", ["is a file", "the folder that it is in"]),
    ],
)
def test_other_formats_are_refused_with_the_way_to_convert_them(files, path, words, refusal, tmp_path):
    for name, text in files.items():
        (tmp_path / "other" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "other" / name).write_text(text)
    assert_names(refusal(f"model.path=./{path}"), f"model.path=./{path} ", *words)


@pytest.mark.parametrize(
    ("phase", "helps"),
    [
        ("engine_start", "lower rollout.concurrent_samples, rollout.memory_fraction"),
        ("update", "lower actor.max_tokens_per_microbatch"),
        (None, "start more processes"),
    ],
)
@pytest.mark.parametrize("cuda", [False, True])
def test_a_lack_of_memory_ends_with_what_would_help(
    phase, helps, cuda, run_main, settings, tmp_path, monkeypatch, capsys
):
    def lacking(*_: object) -> None:
        with Stopwatch()(phase) if phase else nullcontext():
            if cuda:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")
            torch.empty(2**57)

    monkeypatch.setattr("trainer.trainer.Trainer.__init__", lacking)
    code = run_main("train", *settings["train"])
    assert code.startswith("error: There is not enough memory ")  # what Python prints last, and exits with 1
    assert_names(code, phase or "before the first step", "2.00 GiB" if cuda else f"{2**59} bytes", helps)
    assert "Traceback" in capsys.readouterr().err


def test_an_engine_that_lacks_memory_says_which_setting_helps(tmp_path):
    (tmp_path / "log").write_text("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    said = str(EngineProcess(1.0, tmp_path / "log").failure("start", "failed"))
    assert_names(said.splitlines()[-1], "rollout.memory_fraction", "raise it where")


def test_devices_that_are_not_there(refusal, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_names(refusal("device=cuda"), "device=cuda", "device=cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert_names(refusal("device=cuda"), "2 processes", "1 CUDA device", "--nproc-per-node")


def test_data_that_cannot_be_used(refusal, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    assert_names(refusal("data.train=empty.jsonl"), "data.train", "empty.jsonl", "no rows")
    assert_names(refusal("data.train=emty.jsonl"), "data.train", "emty.jsonl", "did you mean empty.jsonl")
    row = {"prompt": "1 2 3 to 6", "numbers": [1, 2, 3], "response": "1"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 20)
    assert_names(refusal("data.train=rows.jsonl"), "'countdown'", "'target'", "prompt, numbers, response")
    # Held-out rows are graded as well.
    assert_names(refusal("data.eval=rows.jsonl"), "'countdown'", "'target'")


def test_demonstrations_that_cannot_be_used(refusal, countdown):
    assert_names(refusal("data.response_column=reply", command="sft"), "data.response_column", "reply", "response")
    assert_names(refusal("samples_per_step=65", command="sft"), "samples_per_step=65", "64")
    without = refusal(f"data.eval={countdown / 'heldout.jsonl'}", command="sft")
    assert_names(without, "data.eval: data.response_column", "'response'", "prompt, numbers, target")
    assert_names(refusal("actor.max_tokens_per_microbatch=16", command="sft"), "longest demonstration", "raise it")


def test_config_files_that_cannot_be_read(refusal, tmp_path):
    assert_names(refusal("none.yaml", base=False), "none.yaml", "examples/countdown_cpu.yaml")
    (tmp_path / "broken.yaml").write_text("steps: [1\nseed: 2\n")
    assert_names(refusal("broken.yaml", base=False), "broken.yaml", "not valid YAML")
    (tmp_path / "wrong.yaml").write_text("rollout: {temperatur: 1}\n")
    assert_names(refusal("wrong.yaml", base=False), "wrong.yaml", "rollout.temperature")
    (tmp_path / "old.yaml").write_text("algorithm: {preset: dapo, epochs_per_step: 2}\n")
    assert_names(refusal("old.yaml", base=False), "old.yaml is called batch.epochs_per_step now")


@pytest.mark.parametrize("command", ["train", "sft"])
def test_going_on_with_other_data_is_refused(command, refusal, tmp_path, capsys):
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    checkpoint.mkdir(parents=True)
    position = {"given": 12, "size": 15, "seed": 0, "shuffle": True}
    (checkpoint / "progress.json").write_text(json.dumps({"step": 3, "updates": 3, "version": 3, "data": position}))
    sentence = refusal("checkpoint.resume=true", "steps=9", command=command)
    assert_names(sentence, "cannot be resumed", "it was 15", "set it back or start a new run")


def test_a_run_that_is_none_is_neither_exported_nor_plotted(run_main, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    for arguments, words in (
        (["export", tmp_path / "folder", tmp_path / "out"], "is not the folder of a run"),
        (["plot", tmp_path / "folder", "--out", tmp_path / "curve.png"], "give the folder of a run"),
    ):
        assert run_main(*arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert_names(error, "error: ", str(tmp_path / "folder"), words)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_refusal_under_torchrun_is_printed_once(settings):
    """All processes refuse; the sentence comes from the first, with nothing of ours but it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer"]
    done = subprocess.run(
        [*command, "train", *settings["train"], "actor.tensor_parallel=2", "batch.prompts_per_step=20"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode != 0
    ours = done.stderr.partition("torch/distributed/elastic")[0]
    assert ours.startswith("error: batch.prompts_per_step=20")
    assert "Traceback" not in ours
    assert ours.count("error: ") == 1
    assert "exitcode  : 2" in done.stderr


@pytest.mark.parametrize(("command", "schema"), [([], TrainConfig), (["train"], TrainConfig), (["sft"], SftConfig)])
def test_help_has_every_setting_with_its_meaning(command, schema, run_main, capsys):
    assert run_main(*command, "--help") == 0
    shown = capsys.readouterr().out.splitlines()
    for key, _, _, doc in describe(schema):
        assert len(doc) > 10, f"{key} has no doc"
        line = next((i for i, text in enumerate(shown) if text.startswith(f"  {key} (")), None)
        assert line is not None, key
        assert shown[line + 1].strip() == doc


def test_the_settings_page_in_the_docs_is_what_the_command_prints():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == settings_page() + "\n", "run python -m trainer settings > docs/config.md"
