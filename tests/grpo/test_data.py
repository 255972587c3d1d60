"""Prompts: their sources, rendering, tokens and order. Nothing here reaches for the network."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import datasets
import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

import rewards
from examples.countdown import make_tokenizer
from grpo.config import ConfigError, load
from grpo.data import PromptStream, load_held_out, load_prompts, tokenize_prompts, tokenize_responses
from grpo.data_config import DataConfig
from grpo.sources import load_rows

ROWS = [{"prompt": f"{n} 2 to 5", "response": "yes", "numbers": [n, 2], "target": 5} for n in range(10)]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def chat_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '(' if m.role == 'system' else '=' }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}yes {% endif %}"
    )
    return tokenizer


@pytest.fixture
def no_hub(monkeypatch):
    """Any request to the hub fails as it does without a network."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    answer_hub(monkeypatch, httpx.ConnectError("Name or service not known"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("the hub was asked again"))


def answer_hub(monkeypatch, answer: Exception | None) -> None:
    """The hub answers a question for a dataset with `answer`."""
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", Mock(side_effect=answer))


def write_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """The block raises a ConfigError of one line with all `parts`."""
    with pytest.raises(ConfigError) as error:
        yield
    assert "\n" not in str(error.value)
    assert [part for part in parts if part not in str(error.value)] == [], error.value


# sources


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv"])
def test_files_are_read_whatever_the_split(tmp_path, ending):
    path, rows = tmp_path / f"rows.{ending}", datasets.Dataset.from_list(ROWS)
    if ending == "csv":
        rows = rows.remove_columns("numbers")
    if ending == "json":
        path.write_text(json.dumps(ROWS))
    else:
        {"jsonl": rows.to_json, "parquet": rows.to_parquet, "csv": rows.to_csv}[ending](path)
    assert list(load_rows(str(path), "anything")) == list(rows)


def test_a_saved_folder_with_and_without_splits(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    assert load_rows(str(tmp_path / "one"), "anything")[3] == ROWS[3]
    datasets.DatasetDict(train=rows, dev=rows.select([1])).save_to_disk(tmp_path / "two")
    assert list(load_rows(str(tmp_path / "two"), "dev")) == [ROWS[1]]
    with refused("data.eval_split=test", "train, dev"):
        load_rows(str(tmp_path / "two"), "test", key="data.eval")


def test_functions_are_called_with_the_split(tmp_path, monkeypatch):
    path = tmp_path / "made_rows.py"
    path.write_text("def rows(split):\n    yield {'prompt': split}\n    yield {'prompt': '2', 'extra': [1]}\n")
    expected = [{"prompt": "dev", "extra": None}, {"prompt": "2", "extra": [1]}]
    assert list(load_rows(f"{path}:rows", "dev")) == expected
    monkeypatch.syspath_prepend(tmp_path)
    assert list(load_rows("made_rows:rows", "dev")) == expected
    for wrong, says in [
        (f"{path}:row", "did you mean rows?"),
        ("made_rows:row", "did you mean rows?"),
        ("made_up_rows:rows", "no module made_up_rows"),
        (f"{tmp_path}/made_row.py:rows", "did you mean made_rows.py?"),
    ]:
        with refused("data.train", says):
            load_rows(wrong, "train")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("yield 3", "yields 3 as row 0"),
        ("yield {'a': 1}; yield {'a': [2]}", "share types"),
        ("yield from ()", "holds no rows"),
    ],
)
def test_functions_that_yield_no_table(tmp_path, body, says):
    (tmp_path / "made.py").write_text(f"def rows(split):\n    {body}\n")
    with refused("data.train", says):
        load_rows(f"{tmp_path}/made.py:rows", "train")


def test_a_file_that_is_not_there_names_the_nearest(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS)
    with refused("data.train", "trian.jsonl", "did you mean train.jsonl?"):
        load_rows(str(tmp_path / "trian.jsonl"), "train")
    with refused("nor a folder"):
        load_rows(str(tmp_path / "nowhere" / "train.jsonl"), "train")


EMPTY = [(f"rows.{ending}", "", "") for ending in ("jsonl", "json", "parquet", "csv", "xml")]
BROKEN = [(f"rows.{ending}", "\x00 no table {", "") for ending in ("jsonl", "json", "parquet", "xml")]


@pytest.mark.parametrize(
    ("name", "content", "says"), [*EMPTY, *BROKEN, ("rows.csv", "prompt,target\n", "holds no rows")]
)
def test_files_that_cannot_be_read(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with refused("data.train", name, says):
        load_rows(f"{tmp_path}/{name}", "train")


def test_what_is_on_disk_wins_over_the_hub(tmp_path, monkeypatch, no_hub):
    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_list(ROWS).save_to_disk("org/name")
    assert len(load_rows("org/name", "train")) == len(ROWS)


def test_without_a_network_the_answer_is_quick(no_hub):
    start = time.monotonic()
    with refused("data.train", "org/name", "cannot be reached", "local file"):
        load_rows("org/name", "train")
    assert time.monotonic() - start < 10


def test_offline_only_the_cache_is_asked(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    answer_hub(monkeypatch, AssertionError("asked the hub"))
    not_cached = ConnectionError("Couldn't reach 'org/name' on the Hub (OfflineModeIsEnabled)")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=not_cached))
    with refused("data.train", "OfflineModeIsEnabled", "local file"):
        load_rows("org/name", "train")


def test_a_hub_name_nobody_has(monkeypatch, no_hub):
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    answer_hub(monkeypatch, RepositoryNotFoundError("404", response=response))
    with refused("data.train", "org/nmae", "neither a file here nor a dataset", "local file"):
        load_rows("org/nmae", "train")


def test_the_hub_is_given_subset_and_split(monkeypatch, no_hub):
    answer_hub(monkeypatch, None)

    def hub(name, subset, split):
        if split != "test":
            raise ValueError(f'Unknown split "{split}". Should be one of ["train", "test"].')
        return datasets.Dataset.from_list([{"prompt": f"{name} {subset}"}])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert load_rows("org/name", "test", "main")[0] == {"prompt": "org/name main"}
    with refused("data.eval_split=tset", '["train", "test"]', "data.subset=main"):
        load_rows("org/name", "tset", "main", key="data.eval")


# rendering and tokens


def prompts_of(tokenizer, rows=ROWS, **settings):
    return tokenize_prompts(datasets.Dataset.from_list(rows), tokenizer, DataConfig(**settings), "data.train")


def test_raw_prompts_keep_their_rows(tokenizer):
    prompts = prompts_of(tokenizer, opening=" <think>")
    assert [p.index for p in prompts] == list(range(10))
    assert prompts[7].row == ROWS[7]
    assert isinstance(prompts[7].row["numbers"], list)
    assert prompts[7].text == "7 2 to 5 <think>"
    assert prompts[7].tokens == tokenizer.convert_tokens_to_ids(["7", "2", "to", "5", "<think>"])


def test_a_template_is_filled_from_the_columns(tokenizer):
    prompts = prompts_of(tokenizer, template="{numbers[0]} , {numbers[1]} to {target:d}")
    assert prompts[3].text == "3 , 2 to 5"


def test_chat_uses_the_template_the_system_message_and_the_opening(chat_tokenizer):
    prompts = prompts_of(chat_tokenizer, chat=True, system="no", opening="<think>")
    assert prompts[4].text == "( no = 4 2 to 5 yes <think>"
    messages = [{"prompt": [{"role": "system", "content": "to"}, {"role": "user", "content": "9"}]}]
    assert prompts_of(chat_tokenizer, messages, chat=True)[0].text == "( to = 9 yes "


def test_special_tokens_are_added_to_raw_prompts_only(chat_tokenizer):
    from tokenizers.processors import TemplateProcessing

    eos = chat_tokenizer.eos_token_id
    chat_tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", special_tokens=[("<eos>", eos)])
    assert prompts_of(chat_tokenizer)[0].tokens[0] == eos
    assert eos not in prompts_of(chat_tokenizer, chat=True)[0].tokens
    assert tokenize_responses(prompts_of(chat_tokenizer), chat_tokenizer, DataConfig())[0].count(eos) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt_column": "prmpt"}, ["data.prompt_column", "'prmpt'", "did you mean prompt?", "target"]),
        ({"prompt_column": "numbers"}, ["data.prompt_column", "row 0", "[0, 2]"]),
        ({"template": "{number}"}, ["data.template", "'number'", "did you mean numbers?"]),
        ({"template": "{}"}, ["data.template", "''"]),
        ({"template": "{target"}, ["data.template", "brace"]),
        ({"template": "1 to 2"}, ["data.template", "names no column"]),
        ({"template": "{numbers[5]}"}, ["data.template", "row 0"]),
        ({"template": "{prompt:d}"}, ["data.template", "row 0"]),
        ({"chat": True}, ["data.chat", "chat template"]),
        ({"system": "yes"}, ["data.system", "data.chat=true"]),
        ({"too_long": "cut"}, ["data.too_long", "error, drop"]),
        ({"max_prompt_tokens": 3}, ["data.train", "row 0", "4 tokens", "10 of 10", "too_long=drop"]),
        ({"max_prompt_tokens": 3, "too_long": "drop"}, ["data.train", "all 10 prompts", "4 tokens"]),
    ],
)
def test_settings_that_do_not_fit_the_data(tokenizer, settings, says):
    with refused(*says):
        prompts_of(tokenizer, **settings)


def test_an_empty_prompt_names_its_row(tokenizer):
    with refused("data.train", "row 1", "empty"):
        prompts_of(tokenizer, [{"prompt": "1"}, {"prompt": " "}])


def test_long_prompts_are_dropped_and_the_rest_keep_their_row_numbers(tokenizer):
    rows = [{"prompt": "1 " * n} for n in (3, 9, 1, 9)]
    with pytest.raises(ConfigError, match=r"row 1 has 9 tokens.*2 of 4"):
        prompts_of(tokenizer, rows, max_prompt_tokens=3)
    prompts = prompts_of(tokenizer, rows, max_prompt_tokens=3, too_long="drop")
    assert [(p.index, len(p.tokens), p.row) for p in prompts] == [(0, 3, rows[0]), (2, 1, rows[2])]
    assert [prompts[i] for i in range(2)] == list(prompts)


def test_responses_end_with_eos(tokenizer):
    responses = tokenize_responses(prompts_of(tokenizer), tokenizer, DataConfig())
    assert responses == [[tokenizer.convert_tokens_to_ids("yes"), tokenizer.eos_token_id]] * 10
    for column, says in [("respnse", "did you mean response?"), ("target", "row 0")]:
        with refused("data.response_column", says):
            tokenize_responses(prompts_of(tokenizer), tokenizer, DataConfig(response_column=column))
    without_eos = make_tokenizer()
    without_eos.eos_token = None
    with refused("no eos token"):
        tokenize_responses(prompts_of(tokenizer), without_eos, DataConfig())


def test_load_prompts_follows_the_config(tmp_path, tokenizer):
    train, held_out = write_lines(tmp_path / "a.jsonl", ROWS), write_lines(tmp_path / "b.jsonl", ROWS[5:])
    config = load(DataConfig, overrides=[f"train={train}", f"eval={held_out}", "eval_limit=2"])
    assert len(load_prompts(config, tokenizer, "train")) == 10
    assert [p.row for p in load_prompts(config, tokenizer, "eval")] == ROWS[5:7]
    with refused("data.train is not set"):
        load_prompts(DataConfig(), tokenizer, "train")
    with refused("data.eval_limit=0"):
        load_prompts(DataConfig(eval=held_out, eval_limit=0), tokenizer, "eval")


def test_a_hundred_thousand_rows_take_seconds(tokenizer):
    rows = datasets.Dataset.from_dict({"a": list(range(100)) * 1000})
    start = time.process_time()
    prompts = tokenize_prompts(rows, tokenizer, DataConfig(template="{a} 2 to 5", opening="<think>"), "data.train")
    assert len(prompts) == 100_000
    assert time.process_time() - start < 30


# the order


def indices(stream: PromptStream, steps: int) -> list[int]:
    return [prompt.index for _ in range(steps) for prompt in stream.next()]


def test_every_epoch_gives_each_prompt_once_in_a_new_order(tokenizer):
    stream = PromptStream(prompts_of(tokenizer), 4, seed=1)
    order = indices(stream, 15)
    epochs = [order[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert stream.given == 60
    assert indices(PromptStream(prompts_of(tokenizer), 4, seed=1), 15) == order
    assert indices(PromptStream(prompts_of(tokenizer), 4, seed=2), 15) != order
    # an order made from seed + epoch would give seed 2 what seed 1 gave an epoch later
    assert indices(PromptStream(prompts_of(tokenizer), 10, seed=2), 1) != epochs[1]


def test_without_shuffling_the_rows_keep_their_order(tokenizer):
    assert indices(PromptStream(prompts_of(tokenizer), 4, shuffle=False), 5) == list(range(10)) * 2


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 7])
def test_a_resumed_stream_goes_on_exactly(tokenizer, steps):
    stream, resumed = (PromptStream(prompts_of(tokenizer), 4, seed=3) for _ in range(2))
    indices(stream, steps)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert indices(resumed, 8) == indices(stream, 8)


def test_a_state_of_another_order_is_refused(tokenizer):
    state = PromptStream(prompts_of(tokenizer), 4, seed=3).state_dict()
    for other, says in [
        (PromptStream(prompts_of(tokenizer), 4, seed=4), "seed is 4 but it was 3"),
        (PromptStream(prompts_of(tokenizer, ROWS[:8]), 4, seed=3), "8 prompts but it was 10"),
        (PromptStream(prompts_of(tokenizer), 4, seed=3, shuffle=False), "data.shuffle is False"),
    ]:
        with refused(says):
            other.load_state_dict(state)


def test_a_step_larger_than_the_dataset_is_refused(tokenizer):
    for wrong in (0, 11):
        with refused(f"prompts_per_step={wrong}", "10 prompts"):
            PromptStream(prompts_of(tokenizer), wrong)


def test_the_order_is_the_same_in_every_process():
    program = """
from grpo.data import Prompt, PromptStream
stream = PromptStream([Prompt(i, [1], '', {}) for i in range(9)], 9, seed=5)
print([[p.index for p in stream.next()] for _ in range(2)])
"""
    for hash_seed in ("1", "2"):
        environment, command = {"PYTHONHASHSEED": hash_seed}, [sys.executable, "-c", program]
        out = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert out.stdout == "[[2, 7, 8, 1, 4, 3, 6, 0, 5], [4, 8, 2, 7, 6, 0, 1, 5, 3]]\n", out.stderr


# files of other trainers


VERL = [
    {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": f"{n} to 5"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n)},
        "extra_info": {"index": n, "split": "train"},
    }
    for n in range(3)
]
TRL = [{"prompt": f"{n} to 5", "solution": f"$\\boxed{{{n}}}$", "level": n} for n in range(3)]


def test_files_of_verl_and_trl_by_config_alone(tmp_path, tokenizer, chat_tokenizer):
    datasets.Dataset.from_list(VERL).to_parquet(tmp_path / "rows.parquet")
    write_lines(tmp_path / "rows.jsonl", TRL)
    verl = ["columns={answer: reward_model.ground_truth}", "chat=true", f"train={tmp_path}/rows.parquet"]
    trl = ["columns={answer: solution}", f"train={tmp_path}/rows.jsonl"]
    for given, reader, text in ((verl, chat_tokenizer, "= 1 to 5 yes "), (trl, tokenizer, "1 to 5")):
        prompts = load_prompts(load(DataConfig, overrides=given), reader, "train")
        assert prompts[1].text == text
        assert prompts[1].row.keys() > {"prompt", "answer"}
        assert [rewards.get("math")("It is \\boxed{1}.", prompt.row) for prompt in prompts] == [0.0, 1.0, 0.0]


def test_columns_follow_paths_and_say_where_they_end(tmp_path, chat_tokenizer):
    path = write_lines(tmp_path / "verl.jsonl", VERL)
    columns = {"question": "prompt.0.content", "ability": "extra_info.split"}
    config = DataConfig(train=path, columns=columns, template="{question} yes")
    assert load_prompts(config, chat_tokenizer, "train")[2].row["ability"] == "train"
    for wrong, says in [
        ("reward_modl.style", ["'reward_modl'", "did you mean reward_model?"]),
        ("reward_model.truth", ["row 0", "'truth'"]),
        ("reward_model.ground_trth", ["did you mean ground_truth?"]),
        ("prompt.1.content", ["row 0", "'1' in prompt.1.content"]),
    ]:
        with refused("data.columns.answer", *says):
            load_prompts(DataConfig(train=path, columns={"answer": wrong}), chat_tokenizer, "train")


TURNS = [("system", "to"), ("human", "9"), ("gpt", "3")]


@pytest.mark.parametrize("form", ["role", "from"])
def test_conversations_are_demonstrations_and_their_end_is_no_prompt(form, tmp_path, chat_tokenizer):
    names = {"human": "user", "gpt": "assistant"} if form == "role" else {}
    content = {"role": "content", "from": "value"}[form]
    whole = [{form: names.get(who, who), content: text} for who, text in TURNS]
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": whole, "begun": whole[:2], "completion": whole[2:]}] * 2)
    config = DataConfig(train=path, chat=True, prompt_column="messages")
    three = [chat_tokenizer.convert_tokens_to_ids("3"), chat_tokenizer.eos_token_id]
    with refused("row 0 of messages ends with the assistant's", "messages.0.content"):
        load_prompts(config, chat_tokenizer, "train")
    begun = DataConfig(train=path, chat=True, prompt_column="begun", response_column="completion")
    for settings in (config, begun):
        prompts = load_prompts(settings, chat_tokenizer, "train", demonstrations=True)
        assert prompts[1].text == "( to = 9 yes "
        assert tokenize_responses(prompts, chat_tokenizer, settings) == [three, three]
    assert load_prompts(begun, chat_tokenizer, "train")[0].text == "( to = 9 yes "
    with refused("no column response", "begun of row 0", "set it or complete the row"):
        load_prompts(
            DataConfig(train=path, chat=True, prompt_column="begun"), chat_tokenizer, "train", demonstrations=True
        )


# several held-out sets


def test_each_held_out_set_has_its_own_settings(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "made.py").write_text("def rows(split, n=1):\n    return [{'target': split, 'numbers': [1]}] * n\n")
    hard = f"{{source: {tmp_path}/made.py:rows, split: 'no', template: '{{target}}', options: {{n: 3}}}}"
    sets = f"eval={{easy: {path}, some: {{source: {path}, limit: 2}}, hard: {hard}}}"
    found = load_held_out(load(DataConfig, overrides=[sets, "eval_limit=4"]), tokenizer)
    assert {name: len(prompts) for name, prompts in found.items()} == {"easy": 4, "some": 2, "hard": 3}
    assert set(found["hard"].texts) == {"no"}
    assert load_held_out(DataConfig(), tokenizer) == {}


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ("{a: {split: test}}", ["data.eval.a names no source", "a: {source: FILE"]),
        ("{a: {source: x.jsonl, limt: 3}}", ["data.eval.a.limt", "did you mean limit?"]),
        ("{a: {source: x.jsonl, options: {n: 3}}}", ["data.eval.a.options", "module:function"]),
        ("{a: {source: x.jsonl, limit: 0}}", ["data.eval.a.limit=0"]),
        ("{a: none.jsonl}", ["data.eval.a: there is no file none.jsonl"]),
    ],
)
def test_held_out_sets_that_cannot_work(sets, says, tokenizer):
    with refused(*says):
        load_held_out(load(DataConfig, overrides=[f"eval={sets}"]), tokenizer)
    with refused("data.options", "unset"):
        load_prompts(DataConfig(train="x.jsonl", options={"n": 3}), tokenizer, "train")


# bad input


@pytest.mark.parametrize(("line", "says"), [('{"prompt": "1", ', "is not JSON"), ("[1, 2]", "is not an object")])
def test_a_broken_line_is_named_by_its_number(line, says, tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:6], "", line, *lines[6:]]))
    with refused("data.train: line 8 of", "rows.jsonl", says, "repair or delete the line"):
        load_rows(str(tmp_path / "rows.jsonl"), "train")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "def rows(split):\n    n = 0\n    yield 1 / n\n",
            ["rows raised ZeroDivisionError: ", "made.py, line 3"],
        ),
        ("import json\ndef rows(split):\n    json.loads('{')\n", ["raised JSONDecodeError: ", "made.py, line 3"]),
        ("\ndef rows(split)\n", ["SyntaxError: expected ':'", "made.py, line 2"]),
        ("import json\nrows = jsn.loads\n", ["NameError: name 'jsn'", "made.py, line 2"]),
        ("import no_such_package\n", ["no_such_package", "install it"]),
    ],
)
@pytest.mark.parametrize("module", [False, True])
def test_generators_that_raise_are_named_with_file_and_line(text, says, module, tmp_path, monkeypatch):
    (tmp_path / "made.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made", raising=False)
    with refused("data.train: ", *says):
        load_rows("made:rows" if module else f"{tmp_path}/made.py:rows", "train")


def test_generators_get_what_they_take(tmp_path):
    (tmp_path / "made.py").write_text(
        "def bare():\n    yield {'a': 'none'}\n"
        "def sized(split, *, size=1):\n    yield {'a': f'{split} {size}'}\n"
        "def free(**options):\n    yield {'a': str(options)}\n"
    )
    given = {"bare": {}, "sized": {"size": 3}, "free": {"b": 4}}
    rows = [load_rows(f"{tmp_path}/made.py:{name}", "dev", options=options)[0]["a"] for name, options in given.items()]
    assert rows == ["none", "dev 3", "{'b': 4}"]
    with refused("data.options.sise", "did you mean size?"):
        load_rows(f"{tmp_path}/made.py:sized", "dev", options={"sise": 3})
