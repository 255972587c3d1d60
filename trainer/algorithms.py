"""python -m trainer algorithms [NAME]: the presets as a list, and one of them as formula, choices and paper."""

import dataclasses
import textwrap

from grpo.algorithm import PRESET_SETTINGS, AlgorithmConfig
from grpo.choices import CHOICES
from grpo.presets import PRESETS, values_of


def list_algorithms() -> str:
    """A line for each preset: its name, what it chooses otherwise than grpo, and its paper."""
    lines = ["Presets of algorithm.preset; python -m trainer algorithms NAME prints one.", ""]
    for name, preset in PRESETS.items():
        choices = ", ".join(f"{choice}={value}" for choice, value in preset.choices.items())
        lines += [f"{name:21} {preset.paper}", *_wrapped(choices or "every choice's default", 22)]
    return "\n".join(lines)


def describe_algorithm(name: str) -> str:
    """A preset's formula, choices, paper and differences from grpo; raises ConfigError for another name."""
    values_of(name)
    config, usual = AlgorithmConfig.of(name), AlgorithmConfig()
    lines = [f"{name}: {PRESETS[name].paper}", "", *_wrapped(PRESETS[name].about), "", *formula(config), ""]
    lines.append("choices (algorithm.*)")
    docs = {field.name: field.metadata["doc"] for field in dataclasses.fields(AlgorithmConfig)}
    for choice in PRESET_SETTINGS:
        value, of_grpo = getattr(config, choice), getattr(usual, choice)
        differs = f"   grpo: {of_grpo}" if value != of_grpo else ""
        lines += [f"  {choice} = {value}{differs}", *_wrapped(docs[choice], 6)]
    return "\n".join(lines)


def formula(config: AlgorithmConfig) -> list[str]:
    """The loss of `config` in lines, put together from the formulas of its choices."""
    of = {setting: choices[getattr(config, setting)].formula for setting, choices in CHOICES.items()}
    terms, old = "objective_t", "pi_rollout" if config.ratio_to == "rollout" else "pi_old"
    rows = {
        "objective_t": of["clip"],
        "ratio": of["ratio"],
        "A": of["scale"],
        "A0": of["baseline"],
        "weight_t": of["aggregate"],
    }
    reward = of["combine"] if config.combine != "sum" else "reward"
    if config.kl_in == "loss":
        terms += f" - kl_coefficient {'r ' if config.kl_ratio else ''}kl_t"
        rows |= {"kl_t": of["kl_estimator"], "R" + " = R_t" * (config.baseline == "none"): f"{reward} of the response"}
    else:
        rows["R_t"] = f"{reward} - kl_coefficient sum over s >= t of kl_s;  R = R_1"
        rows["kl_s"] = f"{of['kl_estimator']}, pi_old's"
    if config.drift_coefficient:
        terms += " - drift_coefficient d_t"
        rows["d_t"] = "log(pi(o_t) / pi_old(o_t))^2"
    if config.entropy_coefficient:
        terms += " + entropy_coefficient H_t"
    if config.overlong_share:
        penalty = "clip((L - overlong_share L - |o|) / (overlong_share L), -1, 0), L longest"
        rows["reward"] = f"the rewards' sum + {penalty}"
    if config.resample_rounds:
        rows["groups"] = "those whose rewards differ: others are replaced, at most resample_rounds times"
    rows = {name: line.replace("pi_old", old) for name, line in rows.items()}
    head = f"loss = - sum over tokens t of weight_t ({terms})"
    symbols = "clip_low, kl_coefficient and so on: see below;  N tokens, B responses o_i in G groups, sg[]: no gradient"
    return ["formula", f"  {head}", *(f"    {name:12}= {value}" for name, value in rows.items()), f"    {symbols}"]


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=" " * indent, subsequent_indent=" " * indent)
