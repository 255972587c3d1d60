"""The RolloutWorker on an engine that only counts: room, grading as samples come, seeds, versions, failures."""

import asyncio
from collections import Counter

import pytest

from tests.workers.conftest import prompts_of
from workers.engines.config import RolloutConfig
from workers.engines.protocol import Response
from workers.rollout import RolloutWorker


class CountingEngine:
    """Answers a request with its prompt's first token, after as many turns of the loop as that says."""

    tokens_at_work = 0

    def __init__(self, concurrent_samples=None):
        self.concurrent_samples = concurrent_samples
        self.in_flight = self.most = self.aborts = 0
        self.seeds, self.begun = [], []

    def run(self, work):
        return asyncio.run(work)

    async def sample(self, tokens, sampling):
        self.begun.append(tokens[0])
        self.seeds.append(sampling.seed)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        for _ in range(tokens[0]):
            await asyncio.sleep(0)
        self.in_flight -= 1
        return Response([tokens[0], 1], [-0.5, -0.25], "stop")

    def abort(self):
        self.aborts += 1


@pytest.fixture
def make_worker(engines):
    def make(concurrent_samples=None, grade=None, progress=None):
        engine = CountingEngine(concurrent_samples)
        worker = RolloutWorker(RolloutConfig(), engine, engines, (1,), 3, grade, progress)
        worker.version = 7
        return worker

    return make


def test_groups_come_back_in_the_order_of_their_prompts_with_what_is_known_of_each_token(make_worker):
    worker = make_worker()
    batch = worker.generate(prompts_of([30, 5], [2], [9, 9, 9]), 2, held_out=True)
    assert batch["group"].tolist() == [0, 0, 1, 1, 2, 2]
    assert [row.tolist() for row in batch["tokens"].unbind()][::2] == [[30, 5, 30, 1], [2, 2, 1], [9, 9, 9, 9, 1]]
    assert [row.tolist() for row in batch["versions"].unbind()][1] == [-1, -1, 7, 7]
    assert batch["held_out"].tolist() == [True] * 6
    assert [trajectory.group for trajectory in worker.trajectories] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("room", "most"), [(None, 30), (12, 12), (4, 3), (2, 3)])
def test_a_prompt_is_begun_when_there_is_room_for_its_samples(make_worker, room, most):
    worker = make_worker(room)
    assert len(worker.generate(prompts_of(*([20 - 2 * i] for i in range(10))), 3)) == 30
    assert worker.engine.most == most
    if room == 4:  # a place left over is not used for a part of a group
        assert list(Counter(worker.engine.begun)) == [20 - 2 * i for i in range(10)]


def test_a_sample_is_graded_while_others_are_still_being_sampled(make_worker):
    order = []

    async def grade(trajectory, group):
        order.append((int(trajectory.tokens[0]), worker.engine.in_flight))
        await asyncio.sleep(0)
        trajectory.reward, trajectory.components = float(trajectory.tokens[0]), {"first": 1.0}

    seen = []
    worker = make_worker(grade=grade, progress=lambda *news: seen.append(news))
    batch = worker.generate(prompts_of([90], [1], [40]), 1)
    assert order == [(1, 2), (40, 1), (90, 0)]
    assert batch["rewards"].tolist() == [90.0, 1.0, 40.0]
    assert batch["rewards/first"].tolist() == [1.0] * 3
    assert seen == [(3, 3, 6)]


def test_progress_goes_on_while_no_sample_is_done(make_worker, monkeypatch):
    monkeypatch.setattr("workers.rollout.TICK", 0.0)
    seen = []
    worker = make_worker(progress=lambda *news: seen.append(news))
    monkeypatch.setattr(CountingEngine, "tokens_at_work", property(lambda engine: 10 * engine.in_flight), raising=False)
    worker.generate(prompts_of([9], [30]), 1)
    assert {(0, 2, 20), (1, 2, 12), (2, 2, 4)} <= set(seen)
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)


def test_seeds_differ_in_each_sample_round_version_and_evaluation_and_a_resumed_run_has_them_again(make_worker):
    def seeds_of(worker):
        worker.engine.seeds = []
        for held_out in (False, False, True):
            worker.generate(prompts_of([1], [1]), 2, held_out=held_out)
        worker.version += 1
        worker.generate(prompts_of([1], [1]), 2)
        return worker.engine.seeds

    worker = make_worker()
    first, later = seeds_of(worker), seeds_of(worker)
    assert len({*first, *later}) == 32
    resumed = make_worker()
    resumed.version = 8
    resumed.generate(prompts_of([1], [1]), 2)
    assert resumed.engine.seeds == first[-4:]


def test_an_error_in_grading_ends_the_rollout_and_what_is_in_flight(make_worker):
    async def grade(trajectory, group):
        raise KeyError("no such row")

    worker = make_worker(room := 2, grade=grade)
    with pytest.raises(KeyError, match="no such row"):
        worker.generate(prompts_of(*[[5]] * 50), 1)
    assert worker.engine.aborts == 1
    assert len(worker.engine.begun) <= 2 * room
