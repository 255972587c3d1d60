"""What an environment says becomes ids that follow those sampled, as the template itself would have it."""

import json
import random

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from grpo.config import ConfigError
from grpo.conversation import Call, Dialogue
from grpo.data_config import DataConfig

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
HEADS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + HEADS + OPEN
"""As Qwen2.5 and SmolLM2 have it."""

# Earlier turns lose their thoughts, results of tools are the user's and share a turn, as with Qwen3.
FORGETS_THOUGHTS = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == "assistant" %}<|im_start|>assistant
{% if loop.last %}<think>

</think>

{% endif %}{{ m.content.split("</think>")[-1].lstrip("\n") }}<|im_end|>
{% elif m.role == "tool" %}{% if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The present turn begins with an open thought, of which the history knows nothing.
OPENS_THOUGHTS = FORGETS_THOUGHTS.removesuffix("{% endif %}") + "<think>\n{% endif %}"

# As with Llama 3: nothing between a turn's end and the next header, contents are trimmed, tools speak as ipython.
HEADERS = """<|im_start|>{% for m in messages %}<h>{{ "ipython" if m.role == "tool" else m.role }}</h>

{{ m.content | trim }}<|im_end|>{% endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}<h>assistant</h>

{% endif %}"""

KEEPING = {"chatml": CHATML, "forgets": FORGETS_THOUGHTS, "opens": OPENS_THOUGHTS, "headers": HEADERS}

# The tools stand before the user's last message, as with Mistral.
MOVES_TOOLS = """{% for m in messages %}{% if tools and loop.last %}[TOOLS]{{ tools | tojson }}{% endif %}<|im_start|>
{{ m.content }}<|im_end|>{% endfor %}"""
NUMBERS_TURNS = "{% for m in messages %}{{ loop.revindex }} {{ m.content }}<|im_end|>\n{% endfor %}" + OPEN
SHORTENS = "{% for m in messages %}{% if loop.revindex < 3 %}" + HEADS.split("%}", 1)[1].removesuffix("{% endfor %}")
SHORTENS += "{% endif %}{% endfor %}" + OPEN


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, with two signs as one token each, as chat models have them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return made


def dialogue(tokenizer, template, **settings):
    tokenizer.chat_template = template
    return Dialogue(tokenizer, DataConfig(chat=template is not None, **settings), [tokenizer.eos_token_id])


def test_a_limit_that_a_tokenizer_was_saved_with_cuts_nothing_that_is_said(tokenizer):
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    talk = dialogue(tokenizer, None)
    said = [{"role": "user", "content": "much more than four letters"}]
    assert tokenizer.decode(talk.suffix(said, None)) == said[0]["content"]


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["text", "tools"])
@pytest.mark.parametrize("name", KEEPING)
def test_ids_of_a_conversation_are_those_of_its_template(tokenizer, name, tools):
    talk, role = dialogue(tokenizer, KEEPING[name]), "tool" if tools else "user"
    talk.check(tools)
    messages = [{"role": "user", "content": "How much is 3 and 4?"}]
    text, ids = talk.begin({"prompt": "", "messages": messages}, messages, tools)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    thought = "\n" * (name == "opens") + "so\n</think>\n\n" if name == "opens" else ""
    for number in range(3):
        said = tokenizer(f"{thought}call {number}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        heard = [{"role": role, "content": f"result {number}"}]
        ids += said + talk.suffix(heard, said[-1])
        messages = [*messages, {"role": "assistant", "content": f"call {number}"}, *heard]
    rendered = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
    ours = tokenizer.decode(ids)
    if name == "opens":  # what was thought stays where it was, and the template would have left it out
        assert ours.count("<think>\n\nso\n</think>\n\n") == 3
        ours = ours.replace("<think>\n\nso\n</think>\n\n", "")
    assert ours == rendered
    if name != "opens":
        assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", KEEPING)
def test_what_follows_depends_on_how_the_turn_ended(tokenizer, name):
    talk, heard = dialogue(tokenizer, KEEPING[name]), [{"role": "user", "content": "no"}]
    ended, cut = talk.suffix(heard, tokenizer.eos_token_id), talk.suffix(heard, 5)
    assert cut == [tokenizer.eos_token_id, *ended]  # the turn that was cut is ended by the template
    assert tokenizer.eos_token_id not in ended[:1]
    assert talk.text_of([*tokenizer("4")["input_ids"], tokenizer.eos_token_id]) == "4"
    assert talk.text_of(tokenizer("4")["input_ids"]) == "4"


def test_results_of_several_tools_share_a_turn_where_the_template_says_so(tokenizer):
    talk, heard = dialogue(tokenizer, FORGETS_THOUGHTS), [{"role": "tool", "content": text} for text in "12"]
    said = tokenizer.decode(talk.suffix(heard, tokenizer.eos_token_id))
    assert said.count("<|im_start|>user") == 1
    assert said.index("<tool_response>\n1\n") < said.index("<tool_response>\n2\n")


@pytest.mark.parametrize(
    ("template", "tools", "says"),
    [
        (MOVES_TOOLS, [TOOL], "rewrites a conversation as it goes on: it writes '"),
        (NUMBERS_TURNS, [], "rewrites a conversation as it goes on: it writes '5 Q<|im_end|>"),
        (SHORTENS, [], "leaves out of a conversation what was said"),
        ("{{ raise_exception('one question only') if messages | length > 1 }}", [], "one question only"),
    ],
    ids=["tools move", "turns are numbered", "history is cut", "raises"],
)
def test_a_template_that_rewrites_its_past_is_refused(tokenizer, template, tools, says):
    with pytest.raises(ConfigError, match="The chat template of the model") as refused:
        dialogue(tokenizer, template).check(tools)
    assert says in str(refused.value)
    assert "data.chat=false" in str(refused.value)


def test_a_template_without_tools_is_told_of_them_in_the_system_message(tokenizer):
    talk = dialogue(tokenizer, HEADS + OPEN, system="Be brief.")
    talk.check([TOOL])
    text, _ = talk.begin({"prompt": "3 and 4?"}, "Go.", [TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions")
    assert json.dumps(TOOL) in text
    assert text.endswith("<|im_start|>user\n3 and 4?\n\nGo.<|im_end|>\n<|im_start|>assistant\n")
    said = tokenizer.decode(talk.suffix([{"role": "tool", "content": text} for text in "12"], tokenizer.eos_token_id))
    assert said == "\n<|im_start|>user\n1\n2<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_only_what_was_said_is_added(tokenizer):
    talk = dialogue(tokenizer, None)
    talk.check([])
    assert talk.begin({"prompt": "1 to 9:"}, " go ", []) == ("1 to 9: go ", tokenizer("1 to 9: go ")["input_ids"])
    for last in (5, tokenizer.eos_token_id):
        assert tokenizer.decode(talk.suffix([{"role": "user", "content": "higher "}], last)) == "higher "


def test_a_raw_conversation_goes_on_with_the_ids_of_what_was_said_alone(tokenizer):
    talk, random_ = dialogue(tokenizer, None), random.Random(0)
    for _ in range(50):
        text = "".join(random_.choice(" aé€<\n") for _ in range(random_.randrange(1, 9)))
        assert talk.suffix([{"role": "user", "content": text}], 3) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 7.", []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [Call("add", {"a": 1})]),
        ('a<tool_call>{"name":"x"}</tool_call>b<tool_call>{"name":"y"}</tool_call>', [Call("x"), Call("y")]),
        ('{"name": "add", "parameters": {"a": 1}}', [Call("add", {"a": 1})]),
        ('<|python_tag|>{"name": "add", "parameters": {}}', [Call("add")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', [Call("add", {"a": 2})]),
        (
            '<tool_call>[{"name": "x", "arguments": {"a": 1}}, {"name": "y"}]</tool_call>',
            [Call("x", {"a": 1}), Call("y")],
        ),
        ('<tool_call>{"type": "function", "function": {"name": "x"}}</tool_call>', [Call("x")]),
        ('<think>\n<tool_call>{"name": "x"}\n</think>\n\nNo.', []),
        ('so <tool_call> or\n</think>\n\n<tool_call>{"name": "y"}</tool_call>', [Call("y")]),
        ('<think>\nso\n</think>\n\n{"name": "y", "parameters": {}}', [Call("y")]),
    ],
)
def test_calls_are_read_in_the_forms_that_models_write(tokenizer, text, calls):
    assert dialogue(tokenizer, CHATML).calls(text) == calls


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<tool_call>{"name": "add", "argum', "is not JSON that ends"),
        ("<tool_call>add(1, 2)</tool_call>", "is not JSON that ends"),
        ("<tool_call>[1]</tool_call>", 'A call has the form {"name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'A call has the form {"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "The arguments of add are no JSON object"),
        ('<tool_call>{"name": "add", "arguments": "x"}</tool_call>', "The arguments of add are no JSON object"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(tokenizer, text, says):
    [call] = dialogue(tokenizer, CHATML).calls(text)
    assert says in call.error


def schema(pattern, **parser):
    """A schema of responses as tokenizers of Qwen3 and SmolLM3 have it: the calls of a turn, in JSON."""
    calls = {"type": "array", "x-regex-iterator": pattern, "items": {"type": "object", "x-parser": "json", **parser}}
    return {"type": "object", "properties": {"content": {"type": "string"}, "tool_calls": calls}}


@pytest.mark.parametrize(
    ("text", "calls", "says"),
    [
        ('so <call>{"name": "add", "arguments": {"a": 1}}</call>', [Call("add", {"a": 1})], None),
        ('<call>{"function": {"name": "x"}}</call><call>{"name": "y"}</call>', [Call("x"), Call("y")], None),
        ("no", [], None),
        ('{"name": "x"}', [], None),  # the schema tells what a call is
        ('<call>{"name": "x"</call>', None, "The call could not be read"),
        ("<call>[1]</call>", None, "The call could not be read"),
        ('<tool_call>{"name": "x", "argu', None, "is not JSON that ends"),
    ],
)
def test_a_tokenizer_that_describes_its_responses_is_asked(tokenizer, monkeypatch, text, calls, says):
    monkeypatch.setattr(tokenizer, "response_schema", schema(r"<call>(.*?)</call>"), raising=False)
    found = dialogue(tokenizer, CHATML).calls(text)
    assert found == calls or says in found[0].error


def test_a_schema_of_the_whole_response_that_does_not_fit_is_no_call(tokenizer, monkeypatch):
    whole = schema(r"<call>(.*?)</call>") | {"x-regex": r"^(?P<content>[a-z]*)(?P<tool_calls><call>.*</call>)$"}
    monkeypatch.setattr(tokenizer, "response_schema", whole, raising=False)
    assert dialogue(tokenizer, CHATML).calls('so<call>{"name": "x"}</call>') == [Call("x")]
    assert dialogue(tokenizer, CHATML).calls("NO") == []


def test_a_schema_that_needs_a_package_says_so_before_a_model_is_loaded(tokenizer, monkeypatch):
    transform = {"x-parser-args": {"transform": "{type: 'function', function: @}"}}
    monkeypatch.setattr(tokenizer, "response_schema", schema(r"<call>(.*?)</call>", **transform), raising=False)
    monkeypatch.setattr("grpo.conversation.is_jmespath_available", lambda: False)
    dialogue(tokenizer, CHATML).check([])
    with pytest.raises(ConfigError, match="pip install jmespath"):
        dialogue(tokenizer, CHATML).check([TOOL])


def test_what_is_too_long_is_cut_by_its_tokens(tokenizer):
    talk = dialogue(tokenizer, CHATML)
    assert talk.cut("abcdef", 6) == ("abcdef", False)
    assert talk.cut("abcdefg", 6) == ("abcdef [cut]", True)
