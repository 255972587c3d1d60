"""The RolloutWorker: turns prompts into graded trajectories with the engine of this process."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from grpo.batch import Ending, Trajectory, batch_of, concatenate, select
from grpo.config import ConfigError
from grpo.data import Prompt, text_of
from grpo.packing import balance
from rewards import Failure, Group, RewardPool, RewardsConfig, check_examples
from workers.config import ModelConfig
from workers.conversation import Ask, conversation_fields
from workers.dispatch import HELD, Packed, Worker, pack, unpack
from workers.engines.config import RolloutConfig
from workers.engines.protocol import Engine, Response, Sampling
from workers.parallel.mesh import Counters, InferenceLayout, is_controller

TICK = 1.0  # seconds

Failures = dict[tuple[str, str, str], tuple[int, Failure]]
"""What failed in a rollout: what is to be said of how many samples, of which reward or environment, its kind; how many
samples, and one of the failures."""


def make_engine(
    model: ModelConfig,
    config: RolloutConfig,
    layout: InferenceLayout,
    seed: int,
    log: Path | None = None,
    turns: bool = False,
) -> Engine:
    """The engine of `config` on the ranks of `layout`, asleep; `log` receives what it says, turns: of conversations."""
    if config.engine == "sglang":
        from workers.engines.sglang_engine import SGLangEngine

        return SGLangEngine(model, config, layout, seed, log, turns)
    from workers.engines.torch_engine import TorchEngine, share_of_memory

    return TorchEngine(
        model, layout.device, config.concurrent_samples or 2**31, share_of_memory(layout.device, config.memory_fraction)
    )


class Grader:
    """Grades with the rewards of `config`; a context manager. stop: ids that end a response, left out of its text.

    Raises ConfigError where a reward fails its own examples, which the workers of the pool are given first.
    """

    def __init__(self, config: RewardsConfig, tokenizer: PreTrainedTokenizerBase, stop: Collection[int]) -> None:
        self.pool, self.tokenizer, self.stop = RewardPool(config), tokenizer, set(stop)
        try:
            check_examples(self.pool, config.weights)
        except BaseException as error:
            self.pool.close()
            if isinstance(error, ValueError):
                raise ConfigError(str(error)) from error
            raise

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.close()

    async def __call__(self, trajectory: Trajectory, group: Group) -> None:
        """Set response, reward, components and failures of a trajectory that is sampled to its end."""
        if not trajectory.turns:
            trajectory.response = text_of(trajectory.tokens[trajectory.mask], self.tokenizer, self.stop)
        row = trajectory.info | trajectory.outcome
        graded = self.pool.submit(trajectory.response, row, trajectory.prompt, group)
        grade = await asyncio.wrap_future(graded)
        trajectory.reward, trajectory.components = grade.total, grade.components
        trajectory.failures = grade.failures


def count_failures(trajectories: Sequence[Trajectory]) -> Failures:
    """What failed in these samples."""
    found: Failures = {}
    for trajectory in trajectories:
        failed = [("completions could not be graded by", failure) for failure in trajectory.failures]
        kinds = {error.kind: error for error in trajectory.errors}
        failed += [("conversations met an error of", error) for error in kinds.values()]
        for what, failure in failed:
            key = what, failure.reward, failure.kind
            count, first = found.get(key, (0, failure))
            found[key] = count + 1, first
    return found


class WorkStealing:
    """Which prompts one of several engines works on: its own share, then what the others have not begun.

    So a slow engine leaves no other idle. shares: prompts of each engine; every engine takes its first one itself, and
    a counter for each in the process group's store says how many of the rest are taken.
    """

    def __init__(self, shares: Sequence[Sequence[int]], dp_rank: int, store: dist.Store) -> None:
        self.shares, self.dp_rank, self.store = shares, dp_rank, store

    def __iter__(self) -> Iterator[int]:
        yield self.shares[self.dp_rank][0]
        for offset in range(len(self.shares)):
            owner = (self.dp_rank + offset) % len(self.shares)
            while (taken := self.store.add(f"taken/{owner}", 1)) < len(self.shares[owner]):
                yield self.shares[owner][taken]


@dataclass(frozen=True)
class Task:
    """What the controller asks all engines for."""

    prompts: list[Prompt]
    samples: int
    held_out: bool
    temperature: float
    everyones: bool
    number: int  # of this rollout, in this process group
    first: int  # the number by which its first sample is held


@dataclass(frozen=True)
class _Report:
    """What the controller is told of an engine's samples."""

    rank: int
    batch: Packed  # without tokens
    failures: Failures
    trajectories: list[Trajectory]


class RolloutWorker(Worker):
    """Samples with whatever weights its engine holds. `version` is theirs; the ShardingManager sets it.

    grade: gives a trajectory, one of a group, its reward, on the engine's rank, as soon as it is sampled. converse:
    carries it through the turns of a conversation; None where each prompt has a single answer. progress:
    called with samples done, samples in all and tokens done of all engines, every TICK and at the end. On the
    controller `trajectories` and `failures` are of what was sampled last, and `metrics` say how long that took.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engine: Engine,
        layout: InferenceLayout,
        stop: tuple[int, ...],
        seed: int,
        grade: Callable[[Trajectory, Group], Awaitable[None]] | None = None,
        progress: Callable[[int, int, int], None] | None = None,
        converse: Callable[[Trajectory, Ask], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(layout)
        self.config, self.engine, self.stop, self.seed = config, engine, stop, seed
        self.grade, self.progress, self.converse = grade, progress, converse
        self.store = Counters()
        self.version = -1
        self.rounds: dict[bool, tuple[int, int]] = {}  # held out or not: the last version sampled from, how often
        self.trajectories: list[Trajectory] = []
        self.failures: Failures = {}
        self.metrics: dict[str, float] = {}

    def generate(
        self,
        prompts: Sequence[Prompt] | None,
        samples: int,
        temperature: float | None = None,
        held_out: bool = False,
        everyones: bool = True,
    ) -> TensorDict | None:
        """`samples` graded responses to each prompt, as a batch of P x samples rows, those of a prompt side by side.

        prompts: P of them on the controller, elsewhere None. temperature: another than the configured one, as
        evaluations may want; 0 takes the most likely token. everyones: `trajectories` shall have the samples of all
        engines, not of the controller's alone. Returns the batch on the controller, without its tokens if there are
        several processes (these are held where they were sampled, or, if held out, gone), and None elsewhere.
        """
        task, temperature = None, self.config.temperature if temperature is None else temperature
        version, rounds = self.rounds.get(held_out, (None, 0))
        self.rounds[held_out] = self.version, rounds + 1 if version == self.version else 1
        if version != self.version and not held_out:
            HELD.clear()  # of what the step before learned from
        if prompts is not None:
            first = 0 if held_out else HELD.begin(len(prompts) * samples)
            rest = temperature, everyones, self.store.add("rollouts", 1), first
            task = Task(list(prompts), samples, held_out, *rest)
        task = self.group.share(task, "the prompts of RolloutWorker.generate")
        done, begun, waited = [], time.perf_counter(), 0.0
        self.sampled_at = begun
        if self.layout.tp_rank == 0:
            done = self.engine.run(self._roll_out(task))
            waited = max(0.0, time.perf_counter() - self.sampled_at)
        seconds = time.perf_counter() - begun
        done.sort(key=lambda trajectory: trajectory.group)  # those of a prompt come from one engine, in their order
        batch = self.bring_together(task, done)
        self.metrics = {"perf/rollout_bubble": self._bubble(seconds), "time/rewards": waited}
        if batch is not None and len(batch) != len(task.prompts) * samples:
            raise RuntimeError(f"{len(batch)} samples came back of {len(task.prompts)} prompts x {samples}.")
        return batch

    def bring_together(self, task: Task, done: list[Trajectory]) -> TensorDict | None:
        """All engines' samples on the controller, given those of this one; elsewhere None."""
        batch = batch_of(done).update(conversation_fields(done)) if done else None
        if dist.get_world_size() == 1:
            self.trajectories, self.failures = done, count_failures(done)
            return batch
        report = None
        if batch is not None:
            order = zip((t.group for t in done), itertools.cycle(range(task.samples)), strict=False)
            numbers = [task.first + group * task.samples + sample for group, sample in order]
            if not task.held_out:
                HELD.put(numbers, batch.exclude("versions"))
            rest = batch.exclude(*(name for name, field in batch.items() if field.is_nested))
            told = done if task.everyones or is_controller() else []
            packed = pack(rest.set("held", torch.tensor(numbers)))
            report = _Report(dist.get_rank(), packed, count_failures(done), told)
        reports = self.group.collect(report, "RolloutWorker.generate")
        if reports is None:
            return None
        self.trajectories = sorted(itertools.chain(*(r.trajectories for r in reports)), key=lambda t: t.group)
        self.failures = {}
        for key, (count, failure) in itertools.chain(*(report.failures.items() for report in reports)):
            self.failures[key] = self.failures.get(key, (0,))[0] + count, failure
        batch = concatenate([unpack(report.batch) for report in reports])
        batch = select(batch, batch["held"].argsort())
        if task.held_out:
            return batch.exclude("held")
        for report in reports:
            HELD.holders[report.batch["held"][0]] = report.rank
        return batch

    def _bubble(self, seconds: float) -> float:
        """The share of the rollout in which the mean engine had nothing left to do, given this one's `seconds`."""
        most = torch.tensor(seconds if self.layout.tp_rank == 0 else 0.0, dtype=torch.double)
        total = most.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return 1 - float(total) / self.layout.dp_size / float(most)

    async def _roll_out(self, task: Task) -> list[Trajectory]:
        """This engine's part of a rollout: groups, begun as there is room for their samples."""
        store = dist.PrefixStore(f"rollout-{task.number}", self.store)  # of this rollout and no other
        shares = balance([len(prompt.tokens) for prompt in task.prompts], self.layout.dp_size)
        mine: Iterator[int] = iter(shares[self.layout.dp_rank])
        limit = self.engine.concurrent_samples
        if self.layout.dp_size > 1 and limit is not None:
            mine = iter(WorkStealing(shares, self.layout.dp_rank, store))
        room = asyncio.Semaphore(max(limit or len(task.prompts) * task.samples, task.samples))
        groups: list[asyncio.Task] = []
        self.done = self.sampled = 0
        self.told = 0, 0
        ticking = asyncio.create_task(self._tick(task, store))
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for _ in range(task.samples):
                        await room.acquire()
                    if (index := next(mine, None)) is None:
                        for _ in range(task.samples):  # which further turns have a use for
                            room.release()
                        break
                    groups.append(tasks.create_task(self._sample_group(task, index, room)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            ticking.cancel()
            self.engine.abort()
        self._tell(task, store)
        return [trajectory for group in groups for trajectory in group.result()]

    async def _sample_group(self, task: Task, index: int, room: asyncio.Semaphore) -> list[Trajectory]:
        """All samples of prompt `index`, graded."""
        group = Group(task.samples)
        return await asyncio.gather(*(self._sample(task, index, n, room, group) for n in range(task.samples)))

    async def _tick(self, task: Task, store: dist.Store) -> None:
        """Tell every TICK how far the rollout is: with long responses, none may be done for minutes."""
        while True:
            await asyncio.sleep(TICK)
            self._tell(task, store)

    def _tell(self, task: Task, store: dist.Store) -> None:
        """Add what this engine has done since this was last told to what all have done."""
        news, before = (self.done, self.sampled + self.engine.tokens_at_work), self.told
        done, tokens = store.add("samples", news[0] - before[0]), store.add("tokens", news[1] - before[1])
        self.told = news
        if self.progress is not None:
            self.progress(done, len(task.prompts) * task.samples, tokens)

    async def _sample(self, task: Task, index: int, sample: int, room: asyncio.Semaphore, group: Group) -> Trajectory:
        prompt = task.prompts[index]
        trajectory = Trajectory(prompt.tokens, index, task.held_out, prompt.row, prompt.text)
        # A function of what is sampled alone, so that a resumed run samples what the unbroken one did.
        _, rounds = self.rounds[task.held_out]
        numbers = (self.seed, self.version, task.held_out, rounds, index, sample)
        asked = 0

        async def ask(most: int) -> Response:
            """Have the policy go on with at most `most` tokens. While its environment works, others have the room."""
            nonlocal asked
            seed = hash((*numbers, asked) if asked else numbers) % 2**31
            limits = self.config.top_p, self.config.top_k, most
            sampling = Sampling(task.temperature, *limits, self.stop, seed, tuple(self.config.stop))
            if asked:
                await room.acquire()
            asked += 1
            try:
                response = await self.engine.sample(trajectory.tokens, sampling)
            finally:
                room.release()
            self.sampled_at = time.perf_counter()
            trajectory.add_sampled(response.tokens, response.logprobs, self.version)
            trajectory.finish_reason = Ending(response.finish_reason)
            self.sampled += len(response.tokens)
            return response

        if self.converse is None:
            await ask(self.config.max_response_tokens)
        else:
            try:
                await self.converse(trajectory, ask)
            finally:
                if not asked:
                    room.release()  # its environment never began
        if self.grade is not None:
            await self.grade(trajectory, group)
        self.done += 1
        return trajectory
