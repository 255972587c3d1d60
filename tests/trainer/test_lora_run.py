"""A run that trains adapters: it goes on exactly, its checkpoints are small, and its export is an ordinary model."""

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

from grpo.batch import jagged, make_batch
from tests.trainer.conftest import deterministic, rows_of
from trainer.checkpoint import Checkpoints

LORA = ["actor.lora.rank=4", "actor.lora.alpha=16", "algorithm.kl_coefficient=0.1", "data.eval=null"]


def test_a_resumed_run_is_the_unbroken_one(start, run_main, capsys):
    whole = start("train", "whole", *LORA, "steps=4", "checkpoint.every=2")
    start("train", "parts", *LORA, "steps=2")
    parts = start("train", "parts", *LORA, "steps=4", "checkpoint.resume=true")
    assert deterministic(rows_of(parts)) == deterministic(rows_of(whole))
    assert rows_of(whole)[-1]["kl"] > 0
    weights = []
    for run in (whole, parts):
        assert run_main("export", run, run / "out") == 0
        weights.append(load_file(run / "out/model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    saved = dcp.FileSystemReader(whole / "checkpoints/step-00000004").read_metadata().state_dict_metadata
    assert all("lora_" in name for name in saved if name.startswith("model."))


def test_a_run_does_not_go_on_with_other_adapters(start, run_main, settings, capsys):
    run = start("train", "run", *LORA, "steps=1")
    capsys.readouterr()
    place = [f"tracking.folder={run.parent}", "tracking.name=run", "checkpoint.resume=true"]
    for other in ("actor.lora.alpha=8", "actor.lora.rank=0"):
        assert run_main("train", *settings["train"], *LORA, *place, other) == 2
        error = capsys.readouterr().err
        assert "step-00000001 was trained with actor.lora={'rank': 4, 'alpha': 16.0" in error
        assert error.count("error:") == 1


@pytest.mark.parametrize("model", ["model", "untied"])
def test_an_export_is_the_merged_policy(model, start, run_main, countdown, monkeypatch):
    tokens = torch.randint(2, 118, (3, 12), generator=torch.Generator().manual_seed(0))
    batch = make_batch({"tokens": jagged(tokens.unbind()), "response_mask": jagged((tokens > 0).unbind())})
    for mask in batch["response_mask"].unbind():
        mask[0] = False
    seen, save = [], Checkpoints.save

    def save_and_see(self, step, actor, position):
        seen.append(torch.stack(actor.compute_logprobs(batch)["old_logprobs"].unbind()))
        save(self, step, actor, position)

    monkeypatch.setattr(Checkpoints, "save", save_and_see)
    run = start("sft", "run", f"model.path={countdown / model}", *LORA[:2], "actor.learning_rate=0.03")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(countdown / model, dtype=torch.float32)
    assert dict(loaded.named_parameters()).keys() == dict(base.named_parameters()).keys()
    changed = {n for n, w in loaded.named_parameters() if not torch.equal(w, base.get_parameter(n))}
    assert changed == {n for n, _ in base.named_parameters() if n.endswith("_proj.weight")}
    with torch.no_grad():
        logits = [each(tokens).logits[:, :-1].log_softmax(-1) for each in (loaded, base)]
    logprobs = [each.gather(2, tokens[:, 1:, None])[:, :, 0] for each in logits]
    torch.testing.assert_close(logprobs[0], seen[0][:, 1:], rtol=1e-5, atol=1e-5)
    assert (logprobs[0] - logprobs[1]).abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_adapters_compute_in_peft_what_the_merged_export_does(dtype, start, run_main, countdown, tmp_path):
    run = start("sft", "run", *LORA[:2], "actor.learning_rate=0.03", "actor.lora.targets=[q_proj, down_proj]")
    assert run_main("export", run, tmp_path / "adapters", "--adapters", "--dtype", dtype) == 0
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == names
    assert "LoRA adapters of rank 4, in " + dtype in (tmp_path / "adapters/README.md").read_text()
    assert "LoRA adapters of rank 4, merged, in float32" in (run / "model/README.md").read_text()
    base, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (countdown / "model", run / "model")
    )
    tokens = torch.randint(2, 118, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, expected = base(tokens).logits, merged(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")(tokens).logits
    near = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(adapted, expected, rtol=0, atol=near)
    assert (expected - before).abs().max() > 20 * near
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapters").base_model_name_or_path == str(countdown / "model")
