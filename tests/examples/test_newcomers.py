"""The pages for newcomers hold what they say: the tutorial's commands and the pairs of from_trl and from_verl run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.countdown import make_model
from grpo.config import describe
from trainer.config import TrainConfig

pytestmark = pytest.mark.timeout(600)  # a dozen processes one after the other

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SMALL = ["steps=2", "device=cpu", "rollout.engine=torch", "rollout.max_response_tokens=8", "data.max_prompt_tokens=400"]
SMALL += ["batch.prompts_per_step=2", "batch.samples_per_prompt=2", "evaluation.samples_per_prompt=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny chat model of random weights, which reads and writes bytes."""
    folder = tmp_path_factory.mktemp("model")
    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    tokenizer.save_pretrained(folder)
    make_model("qwen3", vocab=len(letters), hidden=32, feed_forward=64).save_pretrained(folder)
    return folder


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder that has examples/, as a clone has."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def bash(script: str, folder: Path) -> str:
    """What the script prints, run in `folder` with this Python; it ends at the first command that fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_tutorial_can_be_copied_line_by_line(model, place):
    cpu, *rest = [block for block in blocks("tutorial.md", "bash") if "pip install" not in block][1:]
    assert cpu.startswith("python examples/smollm2.py")
    tiny = ["model.path=" + str(model), "data.eval_limit=4", *SMALL]
    # The page's own settings stand before those that make it short.
    setting = f"{cpu.partition(chr(10))[2]}\nsetting+=({' '.join(tiny)})\n"
    said = bash(setting + "\n".join(rest), place)
    assert "5 of 5" in said
    assert "No prompt stands in data.train and data.eval both." in said
    rows = metrics_of(place / "runs/my_task")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["reward/failed"] == 0 for row in rows[1:])
    assert (place / "my_task/curve.png").is_file()
    assert (place / "my_task/model/model.safetensors").is_file()
    assert "pass@" in said


def test_the_page_on_environments_can_be_copied_line_by_line(model, place):
    game, tools = blocks("environments.md", "python")
    [config] = blocks("environments.md", "yaml")
    by_hand, data, train, _pretrained = blocks("environments.md", "bash")
    (place / "my_game").mkdir()
    for name, text in (("nim.py", game), ("tools.py", tools), ("nim.yaml", config)):
        (place / "my_game" / name).write_text(text)
    said = bash(by_hand + data, place).splitlines()
    assert said == [
        "There are 6 stones. Take 1 to 3 of them: answer with a number.",
        "('I take 1, which leaves 3.', 0.0, False)",
        "('', 1.0, True)",
    ]
    short = [
        *SMALL,
        "data.max_prompt_tokens=200",
        "rollout.max_response_tokens=160",
        "environments.max_turn_tokens=4",
        "environments.max_turns=3",
    ]
    said = bash(train.replace("model.path=$model", f"model.path={model} {' '.join(short)}"), place)
    turns = re.findall(r"^ *(assistant|user): (['\"].*)", said, re.M)
    assert [role for role, _ in turns] == ["assistant", "user"] * (len(turns) // 2) + ["assistant"]
    assert len(turns) == 5
    assert "That is no move. There are" in turns[1][1]
    rows = metrics_of(place / "runs/nim")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["environment/turns"] == 3
    rehearse = """
from environments import EnvironmentsConfig, find, rehearse, validate
config = EnvironmentsConfig(files=["my_game/tools.py"])
validate(config, "shop")
rehearse(config, {"shop": {"prices": {"tea": 3.0}, "prompt": "Buy tea."}, "calculator": {"prompt": "Add."}})
print(*find("shop").tools, *find("calculator").tools)
"""
    assert bash(f"python - <<'END'{rehearse}END", place) == "price add\n"


def write_trl(folder: Path) -> None:
    messages = [[{"role": "user", "content": f"What is {n} + 3?"}] for n in range(8)]
    rows = [{"prompt": prompt, "answer": str(n + 3)} for n, prompt in enumerate(messages)]
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_verl(folder: Path) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {n} + 3?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 3)},
            "extra_info": {"index": n},
        }
        for n in range(8)
    ]
    for name in ("train", "heldout"):
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")


@pytest.mark.parametrize(("page", "write"), [("from_trl.md", write_trl), ("from_verl.md", write_verl)])
def test_the_pair_of_a_page_runs(page, write, model, place):
    (place / "sums").mkdir()
    write(place / "sums")
    theirs, ours = blocks(page, "python")
    function = re.search(r"^def .*?(?=\n\n|\Z)", theirs, re.M | re.S)[0].strip()
    assert function in ours  # as it was
    (place / "sums/reward.py").write_text(ours)
    [yaml] = blocks(page, "yaml")
    (place / "sums/task.yaml").write_text(yaml)
    bash(f"python -m trainer train sums/task.yaml model.path={model} {' '.join(SMALL)}", place)
    rows = metrics_of(place / "runs/sums")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["reward/failed"] == 0 for row in rows[1:])


@pytest.mark.parametrize("page", ["from_trl.md", "from_verl.md", "when_nothing_is_learned.md"])
def test_settings_and_metrics_that_a_page_names_exist(page):
    text = (DOCS / page).read_text()
    rows = re.findall(r"^\|(?! *-)(.*)\|$", text, re.M)
    named = re.findall(r"`([^`]+)`", "\n".join(row.split("|")[-1] for row in rows))
    groups, known = zip(*((key.split(".")[0], key) for key, *_ in describe(TrainConfig)), strict=True)
    settings = [name.split("=")[0] for name in named if name.split(".")[0] in groups and "/" not in name]
    assert len(settings) > 20
    assert set(settings) <= {*known, *groups, "actor.lora"}
    if page == "when_nothing_is_learned.md":
        explained = set(re.findall(r"`([^`]+)`", (DOCS / "metrics.md").read_text()))
        metrics = re.findall(r"`([a-z_]+(?:/[A-Za-z_]+)*)`", "\n".join(row.split("|")[0] for row in rows))
        assert len(metrics) > 20
        assert set(metrics) - explained <= {"eval/reward/mean"}
