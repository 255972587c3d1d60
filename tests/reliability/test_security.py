"""The promises of docs/security.md: what is read runs nothing, secrets are not written, nothing listens outside."""

import ipaddress
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jinja2.exceptions import SecurityError
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rewards import RewardPool, RewardsConfig
from tests.reliability.conftest import Process, rows_of, steps_of
from trainer.checkpoint import complete_checkpoints, read_progress
from workers.config import ModelConfig
from workers.models.hub import read_tokenizer

pytestmark = pytest.mark.reliability

MARKER = "was-here"
"""The file that code makes which should never run."""


class Code:
    """Unpickled, it makes the file."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / MARKER}"

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path):
    """What a test unpickles or imports by mistake fails it."""
    yield
    assert not (tmp_path / MARKER).exists()


@pytest.fixture
def refused(run_main, settings, tmp_path, capsys) -> Callable[..., str]:
    """refused(*overrides): the one sentence with which a run ends before it begins."""

    def run(*overrides: str, command: str = "train") -> str:
        place = [f"tracking.folder={tmp_path}", "tracking.name=run"]
        assert run_main(command, *settings[command], *place, *overrides) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said.strip().splitlines()[-1]

    return run


def test_the_marker_would_be_made(tmp_path):
    pickle.loads(pickle.dumps(Code(tmp_path)))
    (tmp_path / MARKER).unlink()


# --- what is read ---------------------------------------------------------------------------------------------------


def into_index(checkpoint: Path, code: Code) -> None:
    """The index as it is, and code beside what it has."""
    index = dcp.FileSystemReader(checkpoint).read_metadata()
    index.planner_data["x"] = code
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def into_optimizer(checkpoint: Path, code: Code) -> None:
    whole = checkpoint.with_name("whole.pt")
    dcp_to_torch_save(checkpoint, whole)
    state = torch.load(whole, weights_only=False)
    whole.unlink()
    state["optimizer"]["param_groups"][0]["lr"] = code
    for path in [*checkpoint.glob("*.distcp"), checkpoint / ".metadata"]:
        path.unlink()
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)


def into_random_states(checkpoint: Path, code: Code) -> None:
    torch.save({"cpu": code}, checkpoint / "random-0.pt")


@pytest.mark.parametrize("poison", [into_index, into_optimizer, into_random_states])
def test_a_checkpoint_runs_nothing(poison, start, refused, run_main, tmp_path, capsys):
    run = start("train", "run", "checkpoint.every=1", "data.eval=null")
    checkpoint = complete_checkpoints(run)[2]
    poison(checkpoint, Code(tmp_path))
    progress = read_progress(checkpoint)
    progress["files"] = {path.name: path.stat().st_size for path in checkpoint.iterdir() if path.suffix != ".json"}
    progress["sums"] = {}
    (checkpoint / "progress.json").write_text(json.dumps(progress))  # one that goes for whole
    sentence = f"error: {checkpoint} holds code, posix.system, that reading it would run: no run wrote it so"
    assert refused("checkpoint.resume=true", "steps=3", "data.eval=null").startswith(sentence)
    assert not (tmp_path / MARKER).exists()
    if poison is into_index:
        assert run_main("export", run, tmp_path / "out") == 2
        assert capsys.readouterr().err.startswith(sentence)
    elif poison is into_optimizer:  # which it does not read
        assert run_main("export", run, tmp_path / "out") == 0


@pytest.fixture
def model(countdown, tmp_path) -> Path:
    return shutil.copytree(countdown / "model", tmp_path / "model")


def test_weights_are_safetensors_and_no_other_file_is_opened(model, start, refused, tmp_path):
    torch.save({"model.norm.weight": Code(tmp_path)}, model / "pytorch_model.bin")
    torch.save(Code(tmp_path), model / "training_args.bin")
    start("train", "first", f"model.path={model}", "data.eval=null")
    (model / "model.safetensors").unlink()
    assert "has pytorch_model.bin but no *.safetensors" in refused(f"model.path={model}")


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_code_of_a_model_is_never_run(model, start, refused, tmp_path):
    code = f"open({str(tmp_path / MARKER)!r}, 'w')\nfrom transformers import *\n"
    (model / "own.py").write_text(code)
    own = {"AutoConfig": "own.Qwen3Config", "AutoModelForCausalLM": "own.Qwen3ForCausalLM"}
    change(model / "config.json", auto_map=own | {"AutoTokenizer": ["own.PreTrainedTokenizerFast", None]})
    for name in ("TokenizersBackend", "Qwen2Tokenizer", "OwnTokenizer"):
        auto_map = {"AutoTokenizer": ["own.PreTrainedTokenizerFast", "own.PreTrainedTokenizerFast"]}
        change(model / "tokenizer_config.json", tokenizer_class=name, auto_map=auto_map)
        start("train", name, f"model.path={model}", "data.eval=null")
    change(model / "config.json", model_type="own")
    assert "is made of code of its own, not run: use one of the models in README.md." in refused(f"model.path={model}")


def test_a_chat_template_reaches_nothing(model, tmp_path):
    template = "{{ cycler.__init__.__globals__.os.system('touch %s') }}" % (tmp_path / MARKER)
    (model / "chat_template.jinja").write_text(template)
    tokenizer = read_tokenizer(ModelConfig(path=str(model)))
    with pytest.raises(SecurityError, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)


@pytest.mark.parametrize("with_rows", [False, True])
def test_the_script_of_a_data_set_is_never_run(with_rows, refused, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/data.py").write_text(f"open({str(tmp_path / MARKER)!r}, 'w')\n")
    if with_rows:
        (tmp_path / "data/train.jsonl").write_text('{"numbers": [1, 2, 3], "target": 6}\n')
    said = refused(f"data.train={tmp_path / 'data'}")
    assert "Dataset scripts are no longer supported, but found data.py" in said


def test_what_a_process_that_grades_answers_is_not_unpickled(tmp_path):
    """A reward that was taken over may write what it likes to whatever its process has open."""
    (tmp_path / "taken.py").write_text(
        "import os\nfrom rewards import register\n\n"
        '@register("taken")\ndef taken(completion: str, row: dict) -> float:\n'
        "    for name in os.listdir('/proc/self/fd'):\n"
        "        try:\n"
        f"            os.write(int(name), {pickle.dumps(Code(tmp_path))!r} + b'\\n')\n"
        "        except OSError:\n"
        "            pass\n"
        "    return 1.0\n"
    )
    config = RewardsConfig({"taken": 1.0}, files=[str(tmp_path / "taken.py")], processes=1)
    with RewardPool(config) as pool:
        grade = pool.submit("text", {}).result(60)
    assert [failure.kind for failure in grade.failures] == ["crash"]


# --- secrets --------------------------------------------------------------------------------------------------------

SECRETS = {"api_key": "sk-mine-4242", "password": "tiger-4242", "url": "http://me:swordfish-4242@localhost/v1"}
KEYS = {"WANDB_API_KEY": "4242" * 10, "HF_TOKEN": "hf_4242token", "OPENAI_API_KEY": "sk-openai-4242"}
# A data source runs in the trainer's process: with this one the second update fails, which leaves stacks.
FAILS = """
import json, sys

def rows(split):
    worker = sys.modules["workers.actor"].ActorWorker
    update = worker.update

    def fail_later(self, batch):
        if self.version:
            raise RuntimeError("broken on purpose")
        return update(self, batch)

    worker.update = fail_later
    return [json.loads(line) for line in open({source!r})]
"""
KNOWS = """
import os
from rewards import register

@register("knows")
def knows(completion: str, row: dict, *, api_key: str = "", password: str = "", url: str = "") -> float:
    return float({secrets!r} == [api_key, password, url] and os.environ["HF_TOKEN"] == {token!r})
"""


def test_no_secret_is_in_the_record_on_the_screen_or_on_dashboards(
    begin, run_main, countdown, tmp_path, monkeypatch, capfd
):
    for name, value in (KEYS | {"WANDB_MODE": "offline"}).items():
        monkeypatch.setitem(begin.__globals__["ENVIRONMENT"], name, value)  # pytest's own copy of conftest
        monkeypatch.setenv(name, value)
    (tmp_path / "knows.py").write_text(KNOWS.format(secrets=list(SECRETS.values()), token=KEYS["HF_TOKEN"]))
    (tmp_path / "fails.py").write_text(FAILS.format(source=str(countdown / "train.jsonl")))
    own = [f"rewards.files=[{tmp_path / 'knows.py'}]", "rewards.weights={knows: 1.0}"]
    own += [f"rewards.options.knows.{name}={value}" for name, value in SECRETS.items()]
    more = [f"data.train={tmp_path / 'fails.py'}:rows", "data.eval_limit=2", "evaluation.samples_per_prompt=2"]
    more += ["checkpoint.every=1", "tracking.wandb=true", "tracking.tensorboard=true", "tracking.samples_every=1"]
    trained, run = begin("train", "run", *own, *more), tmp_path / "run"
    assert trained.wait(120) == 1, trained.said
    assert run_main("eval", run, "--samples", run / "graded.jsonl", *own) == 0
    assert run_main("export", run, run / "exported") == 0
    assert rows_of(run)[-1]["reward/mean"] == 1.0  # it had them
    assert (run / "config.yaml").read_text().count("***") == 3
    assert "url: http://***@localhost/v1" in (run / "config.yaml").read_text()
    there = {path.relative_to(run) for path in run.rglob("*") if path.is_file()}
    for kind in ("config.yaml", "metrics.jsonl", "samples.jsonl", "graded.jsonl", "eval.json", "stacks-0.txt"):
        assert Path(kind) in there
    for kind in ("wandb/*/run-*.wandb", "tensorboard/events*", "checkpoints/*/progress.json", "exported/README.md"):
        assert list(run.glob(kind)), kind
    told = [str(path) for path in there if b"4242" in (run / path).read_bytes()]
    assert told == []
    assert "4242" not in trained.said + "".join(capfd.readouterr())
    assert "broken on purpose" in (run / "stacks-0.txt").read_text()


def test_an_endpoint_with_a_password_in_its_address_is_refused(refused):
    options = "rewards.options={judge: {url: 'http://me:4242@localhost/v1', model: m}}"
    said = refused("rewards.weights={judge: 1.0}", options)
    assert "rewards.options.judge.url holds a password: put it into $OPENAI_API_KEY as a key instead." in said
    assert "4242" not in said


@pytest.mark.parametrize("command", ["train", "sft"])
def test_the_folder_of_a_run_is_its_user_s_alone(command, start):
    before = os.umask(0)
    try:
        run = start(command, "some/run", "steps=1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(run.stat().st_mode) == 0o700


# --- what listens ---------------------------------------------------------------------------------------------------


def listening(pids: list[int]) -> dict[int, set[str]]:
    """The addresses that each of `pids` listens at for TCP."""
    addresses = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in (line.split() for line in Path(table).read_text().splitlines()[1:]):
            if row[3] == "0A":
                words = bytes.fromhex(row[1].partition(":")[0])
                words = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))  # as the kernel has them
                addresses[f"socket:[{row[9]}]"] = str(ipaddress.ip_address(words))
    found: dict[int, set[str]] = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                link = os.readlink(descriptor)
            except OSError:
                continue
            if link in addresses:
                found.setdefault(pid, set()).add(addresses[link])
    return found


def outside_address() -> str | None:
    """One of this machine that is not the loopback one."""
    lines = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    return next((each for each in lines if ":" not in each), None)


def assert_loopback_alone(run: Process, ranks: int) -> None:
    """Each process of `run` listens at loopback addresses alone, and each rank does; torchrun decides for its own."""
    agents = {pid for pid in run.family() if b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes()}
    assert len(agents) == bool(ranks)
    found = {pid: where for pid, where in listening(run.family()).items() if pid not in agents}
    assert len(found) >= max(1, ranks), run.said
    assert {where for those in found.values() for where in those} <= {"127.0.0.1", "::1"}, found


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_listens_on_the_loopback_address_alone(ranks, begin, tmp_path, monkeypatch):
    """Where the machine's own name leads to the network, as on most."""
    address = outside_address()
    uts = ["unshare", "--user", "--map-root-user", "--uts"]
    if address and not subprocess.run([*uts, "hostname", address], capture_output=True).returncode:
        script = tmp_path / "python"
        command = f'{" ".join(uts)} sh -c \'hostname {address} && exec "$@"\' sh "{sys.executable}" "$@"'
        script.write_text(f"#!/bin/sh\nexec {command}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
    run = begin("train", "run", "steps=200", "data.eval=null", ranks=ranks)
    run.until(lambda: steps_of(tmp_path / "run") >= 2)
    assert_loopback_alone(run, ranks)


@pytest.mark.sglang
@pytest.mark.long
@pytest.mark.timeout(600)
def test_engines_in_processes_of_their_own_listen_there_too(begin, tmp_path):
    engine = ["rollout.engine=sglang", "rollout.concurrent_samples=16"]
    run = begin("train", "run", "steps=200", "data.eval=null", *engine, ranks=2)
    run.until(lambda: steps_of(tmp_path / "run") >= 1, 500)
    assert_loopback_alone(run, 4)


def test_every_test_that_the_page_names_is_there():
    root = Path(__file__).parents[2]
    page, tests = (root / "docs/security.md").read_text(), Path(__file__).read_text()
    named = [each for row in re.findall(r"^\|.*\|(.*)\|$", page, re.M) for each in re.findall("`(.*?)`", row)]
    assert len(named) >= 12
    there = [(root / each).is_file() if "/" in each else f"def test_{each}(" in tests for each in named]
    assert all(there), dict(zip(named, there, strict=True))
