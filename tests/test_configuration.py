"""Configurations that anybody may have written: bounds, types and fields that name code."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from zinfer.checkpoint import configuration, hub
from zinfer.checkpoint.configuration import CheckpointWarning, check, without_code
from zinfer.cli import cli
from zinfer.core.errors import ZinferError
from zinfer.core.model import CONFIG_KEYS
from zinfer.system.documents import DocumentError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "intermediate_size": 80, "max_position_embeddings": 64, "head_dim": None,
}  # fmt: skip

PLAN = ["plan", "--machine", "h100-80gb", "--input-len", "8", "--output-len", "8", "--model"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: zinfer takes at least 1, at most 1,024"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_key_value_heads": [2, 10**9]}, "num_key_value_heads is 1000000000"),
        ({"vision_config": {"depth": 10**9}}, "vision_config.depth is 1000000000"),
        ({"a": [{"encoder_layers": 10**9}]}, "encoder_layers is 1000000000"),
        ({"max_position_embeddings": 1e300}, "max_position_embeddings is 1e\\+300"),
        ({"model_type": 3}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"text_config": [1]}, "text_config"),
        ({"text_config": {"num_hidden_layers": 2000}}, "text_config.num_hidden_layers is 2000"),
        ({"architectures": 3}, "architectures"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, 2**40]}, "eos_token_id"),
        ({"torch_dtype": {}}, "torch_dtype"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"initializer_range": -1.0}, "initializer_range"),
        ({"attention_types": [[["global"], 10**9]]}, "attention_types"),
    ],
)
def test_values_out_of_bounds_are_refused_at_once(change: dict[str, Any], says: str) -> None:
    with pytest.raises(DocumentError, match=f"^c.json: .*{says}") as error:
        check(LLAMA | change, "c.json")
    assert "\n" not in str(error.value)


def test_what_published_configurations_hold_passes() -> None:
    published: list[dict[str, Any]] = [
        {"num_key_value_heads": [2, 4, 4, 2, 2, 2], "eos_token_id": [1, 2], "pad_token_id": -1},
        {"max_position_embeddings": None, "n_inner": None, "num_experts": 0, "max_window_layers": 10**6},
        {"max_length": 10**30, "time_step_limit": [0.0, float("inf")], "rope_scaling": {"factor": 4.0}},
        {"text_config": {"num_hidden_layers": 61, "n_routed_experts": 384}, "vision_config": {"num_heads": [3, 6]}},
        {"_attn_implementation_autoset": True, "attn_implementation": "flash_attention_2", "_name_or_path": "a/b"},
    ]
    for fields in published:
        check(LLAMA | fields, "c.json")
    assert len({name for names in CONFIG_KEYS.values() for name in names}) == len(configuration._BOUNDS)


@pytest.mark.torch
def test_labels_of_a_classifier_are_left_out(tmp_path: Path) -> None:
    """Texts for 10^7 labels would take half a minute, and gigabytes."""
    labels = {"num_labels": 10**9, "id2label": {"0": "a"}, "label2id": {"a": 0}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | labels | {"vision_config": labels}))
    result = CliRunner().invoke(cli, [*PLAN, str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert without_code(LLAMA | labels | {"vision_config": labels}, "") == LLAMA | {"vision_config": {}}


@pytest.mark.torch
def test_pipes_among_the_shapes_that_were_measured_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    planned = CliRunner().invoke(cli, [*PLAN, str(tmp_path)]).stdout
    (shape,) = (tmp_path / "zinfer").glob("shape-*")
    shape.unlink()
    os.mkfifo(shape)
    again = CliRunner().invoke(cli, [*PLAN, str(tmp_path)])
    assert (again.exit_code, again.stdout) == (0, planned)


def test_a_config_of_the_hub_has_the_same_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 10**9}))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **_more: str(tmp_path / "config.json"))
    with pytest.raises(ZinferError, match=r"^some/model: .*num_hidden_layers is 1000000000"):
        hub.config_of("some/model")


CODE = {
    "auto_map": {"AutoModelForCausalLM": "someone/code--modeling.Model"},
    "use_kernels": True,
    "kernel_config": {"kernel_mapping": {"RMSNorm": "someone/kernels:RMSNorm"}},
    "custom_generate": "someone/generate",
    "text_config": {"auto_map": {"AutoConfig": "c.C"}, "hidden_size": 8},
    "vision_config": {"use_pretrained_backbone": True, "use_timm_backbone": True},
    "moe_implementation": "someone/moe",
}


def test_fields_that_name_code_are_left_out_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | CODE | {"attn_implementation": "eager"}))
    with pytest.warns(
        CheckpointWarning, match="config.json: auto_map, custom_generate, .*code of a checkpoint"
    ) as warnings:
        config = configuration.read(tmp_path / "config.json")
    assert len(warnings) == 1
    assert config == LLAMA | CODE | {"attn_implementation": "eager"}, "as written, for the fingerprint"
    assert without_code(config, "") == LLAMA | {"text_config": {"hidden_size": 8}, "vision_config": {}}


@pytest.mark.slow
@pytest.mark.torch
def test_the_default_configuration_of_every_model_type_passes() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    passed = 0
    for kind in CONFIG_MAPPING:
        try:
            default = CONFIG_MAPPING[kind]().to_dict()
        except Exception:  # a few have no default
            continue
        configuration.parse(json.dumps(default, default=str).encode(), kind)
        passed += 1
    assert passed > 600
