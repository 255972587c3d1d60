"""Each module measures one thing: `python -m benchmarks.NAME --help` says what, and its settings with their defaults.

The help is read from the module's text, before the module is imported: torch and transformers take seconds.
"""

import ast
import sys
from pathlib import Path
from typing import TypeVar

from grpo.config import ConfigError, check_values, load

T = TypeVar("T")


def describe(name: str) -> str:
    """What benchmarks/`name`.py says of itself, and the settings of its class Settings, inherited ones included."""
    trees = {each: ast.parse((Path(__file__).parent / f"{each}.py").read_text()) for each in (name, "shapes")}
    classes = {(each, node.name): node for each in trees for node in trees[each].body if isinstance(node, ast.ClassDef)}

    def settings(module: str, class_name: str) -> list[str]:
        node, lines = classes[module, class_name], []
        for base in node.bases:
            lines += settings("shapes", base.attr if isinstance(base, ast.Attribute) else base.id)
        for field in node.body:
            default, doc = field.value.args
            said = f"{field.target.id}={ast.unparse(default)}".replace("'", "").replace("actor=ActorConfig", "actor.*")
            lines.append(f"  {said:28} {ast.literal_eval(doc)}")
        return lines

    about, shown = ast.get_docstring(trees[name], clean=False), "\n".join(settings(name, "Settings"))
    return f"{about}\nSettings, as key=value, with their defaults:\n{shown}"


def read(schema: type[T], settings: list[str]) -> T:
    """The settings of the command line; ends with one sentence where they do not fit."""
    try:
        found = load(schema, None, settings)
        check_values(found)
        return found
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


# While `python -m benchmarks.NAME` imports this package, sys.argv[0] is -m.
if sys.argv[0] == "-m" and {"-h", "--help"} & set(sys.argv[1:]):
    print(describe(next(each for each in sys.orig_argv if each.startswith("benchmarks.")).split(".")[1]))
    sys.exit()
