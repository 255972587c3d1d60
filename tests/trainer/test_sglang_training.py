"""GRPO with the real SGLang behind the loop, on a CPU.

bash tests/run.sh -m sglang
"""

import json

import pytest

from tests.trainer.conftest import rows_of

pytestmark = pytest.mark.sglang


def test_several_steps_with_sglang_in_process(start, settings):
    run = start(
        "train",
        "run",
        "steps=3",
        "rollout.engine=sglang",
        "rollout.release=kv+weights",
        "rollout.concurrent_samples=16",
        "rollout.verify_every=2",
        "actor.offload=[optimizer,parameters]",
        "tracking.samples_every=1",
        "evaluation.every=0",
    )
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert 0 <= row["rollout/logprob_gap"] < 1e-5
        assert row["grad_norm"] > 0
        assert row["sync/bytes"] > 0
    # The first evaluation brings the first weights; released weights come again although the version is the same.
    assert [("time/sync/verify" in row) for row in rows[1:]] == [False, True, False]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {sample["finish_reason"] for sample in samples} <= {"stop", "length"}
    assert len({sample["response"] for sample in samples}) > len(samples) / 2
    assert (run / "engine-0.log").exists()
