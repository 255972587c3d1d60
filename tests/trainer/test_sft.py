"""The loss on held-out demonstrations: what transformers computes, on any processes, and what the user sees of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.trainer.conftest import rows_of, shown
from trainer.screen import SftScreen


def loss_by_transformers(folder: Path, rows: list[dict]) -> float:
    """Of the responses and their end of sequence, over all of their tokens alike."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, losses = transformers.AutoTokenizer.from_pretrained(folder), []
    for row in rows:
        prompt, response = (tokenizer(row[name]).input_ids for name in ("prompt", "response"))
        tokens = torch.tensor([*prompt, *response, tokenizer.eos_token_id])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
        losses.append(-logprobs.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0])
    return float(torch.cat(losses).mean())


@pytest.fixture
def held_out(countdown, tmp_path) -> list[dict]:
    """Seven rows of different length, in tmp_path/few.jsonl and half.jsonl."""
    lines = (countdown / "demonstrations.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:7]]
    for number, row in enumerate(rows):
        row["response"] = " ".join([row["response"], *["1 + 2"] * number])
    for name, part in (("few", rows[:3]), ("half", rows[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return rows


@pytest.mark.parametrize("processes", [1, 2])
def test_the_held_out_loss_is_that_of_transformers(processes, settings, countdown, held_out, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "trainer", "sft", *settings["sft"], f"tracking.folder={tmp_path}", "tracking.name=run"]
    sets = f"data.eval={{few: {tmp_path / 'few.jsonl'}, half: {tmp_path / 'half.jsonl'}}}"
    command += [sets, "evaluation.every=4", "actor.max_tokens_per_microbatch=128"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=True, timeout=120, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    rows = {row["step"]: row["eval/loss"] for row in rows_of(tmp_path / "run") if "eval/loss" in row}
    assert list(rows) == [0, 4, 6]
    first, last = (loss_by_transformers(folder, held_out) for folder in (countdown / "model", tmp_path / "run/model"))
    assert (rows[0], rows[6]) == (pytest.approx(first, rel=1e-5), pytest.approx(last, rel=1e-5))
    assert last < first - 0.1
    assert f"Its loss on data.eval went from {first:.4f} to {last:.4f}." in done.stdout.replace("\n", " ")
    assert re.search(rf"step 0/6  held-out loss {first:.3f}  elapsed", done.stdout)
    assert re.search(r"step 4/6  loss [\d.]+  held-out loss", done.stdout)
    assert re.search(rf"step 6/6  loss [\d.]+  held-out loss {last:.3f}  grad norm [\d.]+  elapsed", done.stdout)


def test_without_held_out_demonstrations_the_loss_is_seen_all_the_same(start, capsys):
    run = start("sft", "run", "steps=2")
    out = capsys.readouterr().out
    assert not any("eval/loss" in row for row in rows_of(run))
    assert "data.eval" not in out
    assert re.search(r"step 2/2  loss [\d.]+  grad norm [\d.]+  elapsed", out)
    screen = SftScreen("run", total_steps=3, history=[{"step": 0, "eval/loss": 4.5}])
    screen.record(1, {"loss": 1.25, "grad_norm": 0.5, "eval/loss": 4.25})
    lines = {line.split("  ")[0]: line for line in shown(screen).splitlines()}
    assert "1.250" in lines["loss"]
    assert lines["held-out loss"].split()[2:4] == ["4.500", "4.250"]
    assert "reward" not in shown(screen)
