"""Makes the countdown example: problems, demonstrations of uneven quality, a tokenizer and a small random model.

    python examples/countdown.py OUT --preset search --seed 0

fills the folder OUT with `model/` (an ordinary Hugging Face folder), `train.jsonl` and `heldout.jsonl` (prompt,
numbers, target; no problem stands in both) and `demonstrations.jsonl` (prompt, response, numbers, target; from
the training problems only). The same preset and seed give the same files again.

A problem asks to reach a target from three different numbers, each used once. A demonstration tries candidates
`( a op b ) op c` aloud, says after each whether it hit, and answers with its last one. Most give up after their
first try, few search on: what is learned from them leaves reinforcement learning something to improve.
"""

import argparse
import functools
import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

Candidate = tuple[int, str, int, str, int]
"""(a, op, b, op, c), which reads ( a op b ) op c."""


@dataclass(frozen=True)
class Preset:
    """One difficulty: which problems there are and how good their demonstrations are."""

    operators: str
    largest_number: int
    right: float  # chance that a try is a right candidate on purpose; otherwise its value is a random one
    patient: float  # share of demonstrations that search on after a miss; the others answer with it
    give_up: float  # chance that a patient one stops after a miss
    most_tries: int
    largest_target: int = 30
    held_out: int = 128
    demonstrations: int = 24_000
    model: dict[str, Any] = field(default_factory=dict)  # of make_model, where it is not the small one


def presets() -> dict[str, Preset]:
    """The difficulties by name.

    search: many tries, and learning to try on pays. direct: a single try, and learning to try the right one pays.
    hard: search with multiplication, where a small model does not reach the top.
    large: harder still, for a model of 76 million parameters and a GPU.
    """
    large = {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_dim": 64, "feed_forward": 2048}
    # The tokenizer's 118 tokens, and two so that four tensor-parallel processes can share them.
    large |= {"vocab": 120, "initializer_range": 0.02}
    return {
        "search": Preset("+-", 10, right=0.0, patient=0.15, give_up=0.1, most_tries=14),
        "direct": Preset("+-", 12, right=0.4, patient=0.0, give_up=1.0, most_tries=1),
        "hard": Preset("+-*", 9, right=0.0, patient=0.2, give_up=0.2, most_tries=10),
        "large": Preset(
            "+-*",
            15,
            0.0,
            largest_target=60,
            patient=0.15,
            give_up=0.1,
            most_tries=14,
            held_out=256,
            demonstrations=120_000,
            model=large,
        ),
    }


@dataclass(frozen=True)
class Problem:
    """Reach `target` from `numbers`, all different, each used once, in any order."""

    numbers: tuple[int, int, int]
    target: int

    def row(self) -> dict:
        """The dataset columns prompt (str), numbers (list of int) and target (int)."""
        prompt = f"{' '.join(map(str, self.numbers))} to {self.target} <think>"
        return {"prompt": prompt, "numbers": list(self.numbers), "target": self.target}

    def shuffled(self, rng: random.Random) -> "Problem":
        """The same problem with its numbers in another order."""
        return Problem(tuple(rng.sample(self.numbers, 3)), self.target)


def calculate(left: int, operator: str, right: int) -> int | None:
    """`left operator right`, or None where the tokenizer has no token for the result (only 0 to 99 have one)."""
    result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return result if 0 <= result <= 99 else None


@functools.cache
def candidates(numbers: tuple[int, int, int], operators: str) -> dict[int, list[Candidate]]:
    """Every candidate over the sorted `numbers`, listed by the value it reaches."""
    found: dict[int, list[Candidate]] = {}
    for (a, b, c), first, second in itertools.product(itertools.permutations(numbers), operators, operators):
        between = calculate(a, first, b)
        value = None if between is None else calculate(between, second, c)
        if value is not None:
            found.setdefault(value, []).append((a, first, b, second, c))
    return found


def problems(preset: Preset, seed: int) -> tuple[list[Problem], list[Problem]]:
    """All problems that have a solution, as (training, held out), in a random order and their numbers too.

    The two are disjoint by sorted numbers and target.
    """
    rng = random.Random(f"problems {seed}")
    solvable = [
        Problem(numbers, target)
        for numbers in itertools.combinations(range(1, preset.largest_number + 1), 3)
        for target in sorted(candidates(numbers, preset.operators))
        if 1 <= target <= preset.largest_target
    ]
    rng.shuffle(solvable)
    solvable = [problem.shuffled(rng) for problem in solvable]
    return solvable[preset.held_out :], solvable[: preset.held_out]


def demonstrate(problem: Problem, preset: Preset, rng: random.Random) -> str:
    """One trace that may or may not solve `problem`; without a hit it answers with its last try.

    Every try reaches a random value, but not that of the try before. It repeats the target beside its value, since
    a small model compares neighbours more easily than it looks back over a long search.
    """
    found = candidates(tuple(sorted(problem.numbers)), preset.operators)
    patient = rng.random() < preset.patient
    words, value = [], None
    for _ in range(preset.most_tries):
        right = rng.random() < preset.right
        value = problem.target if right else rng.choice([other for other in found if other != value])
        a, first, b, second, c = rng.choice(found[value])
        hit = value == problem.target
        words.append(f"{a} {first} {b} = {calculate(a, first, b)} {second} {c} = {value}")
        words.append(f"to {problem.target} {'yes' if hit else 'no'}")
        if hit or not patient or rng.random() < preset.give_up:
            break
    return f"{' '.join(words)} </think> <answer> ( {a} {first} {b} ) {second} {c} </answer>"


def demonstrations(training: list[Problem], preset: Preset, seed: int) -> list[dict]:
    """`preset.demonstrations` rows of prompt, response, numbers and target, going round `training`."""
    rng = random.Random(f"demonstrations {seed}")
    rows = []
    for problem in itertools.islice(itertools.cycle(training), preset.demonstrations):
        shuffled = problem.shuffled(rng)
        rows.append(shuffled.row() | {"response": demonstrate(shuffled, preset, rng)})
    return rows


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """118 tokens: the numbers 0 to 99 and every sign, word and tag as one each; pad and eos are `<pad>`, `<eos>`.

    Text is split at spaces and between signs, decoding puts a space between tokens. A word that is not a token
    is an error, since there is no unknown token. The unused ? makes them an even number, which two
    tensor-parallel processes can share.
    """
    words = ["<pad>", "<eos>", *map(str, range(100)), *"+-*/=(),?", "no", "yes", "to"]
    words += ["<think>", "</think>", "<answer>", "</answer>"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?\w+>|\w+|[^\s]"), "removed", invert=True)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def make_model(
    kind: str = "qwen2",
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 16,
    feed_forward: int = 192,
    vocab: int = 118,
    tied: bool = True,
    initializer_range: float = 0.1,
) -> transformers.PreTrainedModel:
    """A randomly initialised float32 causal language model of the kind qwen2, qwen3 or llama.

    The weights depend on `seed` alone and the global random state is left as it was. Token 0 is pad, 1 is eos.
    initializer_range: the usual 0.02 is for wide layers and learns slower in narrow ones.
    """
    configs = {
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "llama": transformers.LlamaConfig,
    }
    config = configs[kind](
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=feed_forward,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Without these two, transformers samples from the 50 likeliest tokens only, whatever the temperature.
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=1
    )
    return model


def write(out: Path, preset: Preset, seed: int) -> None:
    """Fill the folder `out`: model/, train.jsonl, heldout.jsonl, demonstrations.jsonl."""
    training, held_out = problems(preset, seed)
    make_model(seed=seed, **preset.model).save_pretrained(out / "model")
    make_tokenizer().save_pretrained(out / "model")
    write_lines(out / "train.jsonl", (problem.row() for problem in training))
    write_lines(out / "heldout.jsonl", (problem.row() for problem in held_out))
    write_lines(out / "demonstrations.jsonl", demonstrations(training, preset, seed))


def text_problems(count: int, seed: int) -> list[dict]:
    """`count` rows (numbers, target) for pretrained models: 3 or 4 numbers to 99, + - * /, targets of two digits.

    Every one can be solved, and none stands there twice, whatever the order of its numbers.
    """
    rng = random.Random(f"text problems {seed}")
    rows: dict[tuple, dict] = {}
    while len(rows) < count:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        values = [Fraction(number) for number in numbers]
        while len(values) > 1:
            a, b = values.pop(rng.randrange(len(values))), values.pop(rng.randrange(len(values)))
            values.append(rng.choice([a + b, a - b, a * b, a / b if b else a + b]))
        if values[0].denominator == 1 and 10 <= values[0] <= 99:
            row = {"numbers": numbers, "target": int(values[0])}
            rows.setdefault((tuple(sorted(numbers)), row["target"]), row)
    return list(rows.values())


def write_text(out: Path, seed: int, held_out: int = 512, training: int = 20_000) -> None:
    """Fill the folder `out` for a pretrained model: train.jsonl and heldout.jsonl, disjoint, without prompts."""
    rows = text_problems(held_out + training, seed)
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "heldout.jsonl", rows[:held_out])
    write_lines(out / "train.jsonl", rows[held_out:])


def write_lines(path: Path, rows: Iterable[dict]) -> None:
    """Write a jsonl file, a line a row."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to fill")
    parser.add_argument("--preset", choices=sorted(presets()), default="search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", action="store_true", help="only problems, for a pretrained model and a template")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if arguments.text:
        write_text(arguments.out, arguments.seed)
        print(f"{arguments.out} holds train.jsonl and heldout.jsonl")
        return
    write(arguments.out, presets()[arguments.preset], arguments.seed)
    print(f"{arguments.out} holds model, train.jsonl, heldout.jsonl and demonstrations.jsonl")


if __name__ == "__main__":
    main()
