"""Makes the conversation example: numbers to guess, conversations of uneven quality, a tokenizer and a small model.

    python -m examples.conversation OUT --seed 0

fills the folder OUT with `model/` (that of examples/countdown.py), `train.jsonl` and `heldout.jsonl` (prompt, number;
no prompt stands in both) and `demonstrations.jsonl` (prompt, response, number; of the training prompts only). The same
seed gives the same files again.

A prompt `LOW to HIGH` says between which two numbers the one to guess lies. A demonstration is a whole conversation
with the environment `guess`, as a rollout would have it: a guess, the end of the turn, what the environment says to it,
and the next guess behind the two numbers that it is drawn between. Few players listen: most go on above or below their
guess by chance. None goes to the middle.
"""

import argparse
import itertools
import random
from pathlib import Path

import transformers

from environments.guess import Guess
from examples.countdown import make_model, make_tokenizer, write_lines

TURNS = 6
WIDTHS = range(16, 25)  # how many numbers there are to choose from
HIGHEST = 40  # of all prompts: a number that only one of them has could not be learned from others
HELD_OUT = 40  # prompts
DEMONSTRATIONS = 24_000
LISTENS = 0.25  # share of players


def rows(seed: int) -> tuple[list[dict], list[dict]]:
    """All rows as (training, held out), in a random order: each number of each prompt, two of each held-out one."""
    rng = random.Random(f"numbers {seed}")
    bounds = [(low, low + width + 1) for width in WIDTHS for low in range(1, HIGHEST - width)]
    rng.shuffle(bounds)

    def of(low: int, high: int, count: int) -> list[dict]:
        return [{"prompt": f"{low} to {high}", "number": n} for n in rng.sample(range(low + 1, high), count)]

    held_out = [row for low, high in bounds[:HELD_OUT] for row in of(low, high, 2)]
    training = [row for low, high in bounds[HELD_OUT:] for row in of(low, high, high - low - 1)]
    rng.shuffle(training)
    return training, held_out


def demonstrate(row: dict, rng: random.Random) -> str:
    """One conversation, won or not. A player who listens goes to the side that is said, others to either."""
    low, high = map(int, row["prompt"].split(" to "))
    listens, turns, game = rng.random() < LISTENS, [], Guess()
    game.reset(row)
    for number in range(TURNS):
        guess = rng.choice(range(low + 1, high) or (low, high))  # on the wrong side nothing may be left
        turns.append(f"{low} to {high} {guess}" if number else f"{guess}")
        said, _, done = game.step(turns[-1])
        if done or number == TURNS - 1:
            break
        turns[-1] += f" <eos> {said}"
        low, high = (guess, high) if (said if listens else rng.choice("+-")) == "+" else (low, guess)
    return " ".join(turns)


def demonstrations(training: list[dict], seed: int) -> list[dict]:
    """Rows of prompt, response and number, going round `training`."""
    rng = random.Random(f"conversations {seed}")
    around = itertools.islice(itertools.cycle(training), DEMONSTRATIONS)
    return [row | {"response": demonstrate(row, rng)} for row in around]


def write(out: Path, seed: int) -> None:
    """Fill the folder `out`: model/, train.jsonl, heldout.jsonl, demonstrations.jsonl."""
    training, held_out = rows(seed)
    make_model(seed=seed).save_pretrained(out / "model")
    make_tokenizer().save_pretrained(out / "model")
    write_lines(out / "train.jsonl", training)
    write_lines(out / "heldout.jsonl", held_out)
    write_lines(out / "demonstrations.jsonl", demonstrations(training, seed))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to fill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    write(arguments.out, arguments.seed)
    print(f"{arguments.out} holds model, train.jsonl, heldout.jsonl and demonstrations.jsonl")


if __name__ == "__main__":
    main()
