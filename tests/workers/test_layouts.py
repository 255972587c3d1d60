"""The same step on every layout: dp_size x tp_size, with and without replicas.

One process (1, 1) is the reference; it agrees with transformers, and every other layout agrees with it.
"""

from pathlib import Path

import pytest
import torch
import transformers

from examples.countdown import make_model
from grpo.batch import lengths_of
from grpo.packing import balance, pack
from tests.workers.launch import torchrun
from tests.workers.layout_probe import COMPILED, TEMPERATURE, ragged_batch
from workers.models import family_of
from workers.models.llama import Flops

KINDS = {f"{kind}{'-tied' * tied}": (kind, tied) for kind in ("qwen2", "qwen3", "llama") for tied in (False, True)}
ONE, LAYOUTS = "1-1-r1", ("2-1-r1", "1-2-r1", "1-2-r1-compiled", "2-1-r2", "2-2-r1", "4-1-r1")
"""DP_SIZE-TP_SIZE-rREPLICATE, and whether layers are compiled."""
MADE = [(kind, layout) for layout in LAYOUTS for kind in (COMPILED if "compiled" in layout else KINDS)]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, tied) in KINDS.items():
        for seed, role in enumerate(("policy", "reference")):
            model = make_model(kind=kind, tied=tied, heads=4, kv_heads=2, vocab=120, seed=seed)
            model.save_pretrained(folder / role / name)
    return folder


@pytest.fixture(scope="session")
def run_probe(models, tmp_path_factory):
    """What layout_probe.py saw of a kind on a layout; those of as many processes are run when one is asked for."""
    out = tmp_path_factory.mktemp("layouts")

    def processes(layout: str) -> int:
        dp_size, tp_size, *_ = layout.split("-")
        return int(dp_size) * int(tp_size)

    def get(kind: str, layout: str) -> dict:
        if not (out / f"{kind}-{layout}.pt").exists():
            layouts = [other for other in (ONE, *LAYOUTS) if processes(other) == processes(layout)]
            torchrun(processes(layout), "layout_probe", models, out, *layouts, timeout=280)
        return torch.load(out / f"{kind}-{layout}.pt", weights_only=False)

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_agrees_with_transformers(kind, models, run_probe):
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "policy" / kind, dtype=torch.float32)
    batch, expected = ragged_batch()[0], []
    for tokens, mask in zip(batch["tokens"].unbind(), batch["response_mask"].unbind(), strict=True):
        with torch.no_grad():
            logp = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        expected.append(torch.cat([torch.zeros(1), logp.gather(1, tokens[1:, None])[:, 0]]) * mask)
    torch.testing.assert_close(run_probe(kind, ONE)["old_logprobs"], torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "layout"), MADE)
def test_layouts_agree(kind, layout, run_probe):
    one, many = run_probe(kind, ONE), run_probe(kind, layout)
    for name in ("old_logprobs", "ref_logprobs"):
        torch.testing.assert_close(many[name], one[name], rtol=1e-5, atol=1e-5)
    for name in ("loss", "grad_norm", "entropy", "kl", "clip/low", "clip/high", "ratio/max", "tokens/response"):
        assert many["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-5), name
    assert min(many["metrics"]["clip/low"], many["metrics"]["clip/high"]) > 0
    for tensors in ("weights", "gradient_means"):
        assert many[tensors].keys() == one[tensors].keys()
        for name, expected in one[tensors].items():
            if name.endswith("k_proj.bias"):
                continue  # softmax does not see a shift of all keys: this gradient is 0 but for rounding
            difference = (many[tensors][name] - expected).abs().max() / expected.abs().max()
            assert difference <= 1e-5, (tensors, name)


def work_of_ranks(lengths: list[int], dp_size: int, flops: Flops) -> list[list[int]]:
    """The operations of each micro-batch of each rank, for samples of these lengths with prompts of 4 tokens."""
    shares = [[lengths[i] for i in rows] for rows in balance([flops.cost(n) for n in lengths], dp_size)]
    passes = max(len(pack(share, 128)) for share in shares)
    cut = [[[share[i] for i in rows] for rows in pack(share, 128, passes, flops.cost)] for share in shares]
    return [[flops.forward(micro, sum(micro) - 4 * len(micro)) for micro in share] for share in cut]


@pytest.mark.parametrize("layout", [ONE, *(layout for layout in LAYOUTS if "compiled" not in layout)])
def test_balance_and_bubble_are_those_of_the_ranks_micro_batches(layout, models, run_probe):
    flops = family_of(transformers.AutoConfig.from_pretrained(models / "policy" / "qwen2")).flops()
    lengths, dp_size = torch.tensor(lengths_of(ragged_batch()[0]["tokens"])), int(layout[0])
    balances, bubbles = [], []
    # Two minibatches, of half the groups of four samples each.
    for groups in torch.randperm(6, generator=torch.Generator().manual_seed(0)).chunk(2):
        work = work_of_ranks(lengths.view(6, 4)[groups.sort()[0]].flatten().tolist(), dp_size, flops)
        mean = sum(map(sum, work)) / dp_size
        balances.append(mean / max(map(sum, work)))
        # Ranks wait for each other after each micro-batch.
        bubbles.append(1 - mean / sum(map(max, zip(*work, strict=True))))
    metrics = run_probe("qwen2", layout)["metrics"]
    assert metrics["perf/update_balance"] == pytest.approx(sum(balances) / 2)
    assert metrics["perf/update_bubble"] == pytest.approx(sum(bubbles) / 2, abs=1e-9)
    assert (sum(bubbles) > 0) == (dp_size > 1)


@pytest.mark.parametrize("kind", COMPILED)
def test_layers_cut_over_two_processes_are_compiled_once_for_any_lengths(kind, run_probe):
    first, after_other_lengths = run_probe(kind, "1-2-r1-compiled")["graphs"]
    assert after_other_lengths == first > 0


@pytest.mark.parametrize(("kind", "layout"), [*((kind, ONE) for kind in KINDS), *MADE])
def test_the_engine_holds_and_uses_the_actors_weights(kind, layout, run_probe):
    result = run_probe(kind, layout)
    assert result["engine_holds_the_weights"]
    assert result["rollout_gap"] <= 1e-5
    assert result["version"] == (1, 1)


@pytest.mark.parametrize("layout", [ONE, *LAYOUTS])
def test_samples_come_back_in_the_order_of_their_prompts(layout, run_probe):
    assert run_probe("qwen2", layout)["rollout_prompts"] == [list(range(2, 6 + i // 2)) for i in range(16)]
