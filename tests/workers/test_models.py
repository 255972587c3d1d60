"""What a model family says of its parameters: in the files, in SGLang's model, and under tensor parallelism."""

import pytest
from safetensors import safe_open

from examples.countdown import make_model
from workers.models import FAMILIES, family_of


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_parameter_has_its_names_and_its_cut(kind, tmp_path):
    model = make_model(kind, layers=1)
    model.save_pretrained(tmp_path)
    family, names = family_of(model.config), [name for name, _ in model.named_parameters()]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {family.file_name(name) for name in names} == set(file.keys())
    fused = {family.engine_name(name) for name in names if "_proj" in name}
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    weights = {f"{attention}.qkv_proj", f"{attention}.o_proj", f"{mlp}.gate_up_proj", f"{mlp}.down_proj"}
    biases = {f"{attention}.qkv_proj.bias"} if kind == "qwen2" else set()
    assert fused == {f"{name}.weight" for name in weights} | biases
    assert {name for name in names if family.placement(name).is_replicate()} == {n for n in names if "norm" in n}
