"""Model specs: every catalogue entry against the real transformers model, and checkpoints against the saved model."""

import json
from copy import deepcopy
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import Patch
from tests.test_state import store, stored
from tools import shapes
from zinfer.checkpoint import resolve
from zinfer.checkpoint.architecture import MatrixFinder, _configured, measure
from zinfer.checkpoint.configuration import check
from zinfer.core.model import ModelError, ModelSpec
from zinfer.job.recipe import make_sweep

Saved = tuple[str, torch.nn.Module, Path]  # kind, model, folder


def build(spec: ModelSpec) -> torch.nn.Module:
    """Return the transformers model of `spec`, without memory."""
    config: Any = _configured(spec.architecture, spec.config)
    with torch.device("meta"):
        config = getattr(config, "text_config", config)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype))
    return model


def counted(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def cached_bytes_per_token(spec: ModelSpec, tokens: int = 3) -> int:
    """Return the KV bytes per token of transformers' own cache. They come from its shapes after a forward pass."""
    with torch.device("meta"):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        cache = build(spec)(input_ids=ids, use_cache=True).past_key_values
    size: int = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    return size // tokens


# One of every kind of layer; the others take a minute together.
QUICK = {"bloom-tiny", "opt-1.3b", "falcon-180b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "llama-4-maverick"}
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in resolve.catalogue_names()]


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_the_transformers_model(name: str) -> None:
    """Stored counts equal those of `measure`. Parameters are those of the model itself."""
    spec = resolve.from_catalogue(name)
    assert json.loads(json.dumps(shapes.packed(measure(name, spec.config)))) == resolve._shapes()[name]
    real = build(spec)
    stack = real.get_submodule(spec.stack)
    assert isinstance(stack, torch.nn.ModuleList)
    layers, total = tuple(map(counted, stack)), counted(real)
    assert (spec.layer_parameters, spec.parameters) == (layers, total)
    assert spec.other_parameters == total - sum(layers)
    assert spec.layer_bytes == max(layers) * 2
    assert spec.streamed_bytes + spec.other_bytes == spec.weight_bytes == 2 * total
    for layer, module in zip(spec.layers, stack, strict=True):
        inside = [weight.numel() for name, weight in module.named_parameters() if ".experts." in name]
        assert layer.expert_parameters == sum(inside)
    assert spec.layers[-1].matrices == tuple(matrix for matrix, _, _ in MatrixFinder(real)(stack[-1]))


@pytest.mark.parametrize("name", resolve.catalogue_names())
def test_catalogue_is_sound(name: str) -> None:
    spec = resolve.from_catalogue(name)
    assert spec.architecture == spec.config["model_type"]
    assert spec.num_heads % spec.num_kv_heads == 0
    assert spec.max_position is not None
    assert spec.hub_id is None or spec.hub_id.count("/") == 1
    assert spec.total_layers == spec.num_layers == len(spec.layers)
    if name != "bloom-tiny":  # OPT-13B's name rounds 12.85 up
        published = resolve._catalogue()[name]["published_billions"]
        assert spec.parameters / 1e9 == pytest.approx(published, rel=0.012 if name == "opt-13b" else 0.01)
    part = resolve.resolve(name, layers=spec.num_layers // 2)
    assert part.num_layers == spec.num_layers // 2
    assert 0.25 < part.stored_ratio <= 1
    check(spec.config, name)


def test_released_sizes_are_the_published_ones() -> None:
    """Sources: the model cards; of Kimi K2 Thinking the headers of its checkpoint, without 16 KB of rotary tables."""
    assert tuple(resolve._shapes()) == resolve.catalogue_names(), "all are counted, and no others"
    active = {"deepseek-v3": 36.6, "qwen3-235b-a22b": 22, "gpt-oss-120b": 5.13, "gpt-oss-20b": 3.61}
    for name, count in active.items():
        spec = resolve.from_catalogue(name)
        actual = spec.active_parameters - spec.vocab_size * spec.hidden_size  # no embedding
        assert actual / 1e9 == pytest.approx(count, rel=0.03), name
    for name, size in {"gpt-oss-120b": 60.8, "gpt-oss-20b": 12.8}.items():
        assert resolve.from_catalogue(name).stored_bytes / 2**30 == pytest.approx(size, abs=0.05), name
    kimi = resolve.from_catalogue("kimi-k2-thinking")
    assert kimi.stored_bytes == pytest.approx(594_205_904_896, rel=2e-6)
    assert resolve.from_catalogue("kimi-k2.5").stored_bytes == kimi.stored_bytes
    deepseek = resolve.from_catalogue("deepseek-v3")
    again = 2 * 2 * deepseek.vocab_size * deepseek.hidden_size  # its embedding and head are stored twice
    layer = deepseek.layers[-1].parameters * deepseek.stored_ratio * 2 + 2 * 2 * deepseek.hidden_size**2
    assert (deepseek.stored_bytes + again + layer) / 1e9 == pytest.approx(688.6, abs=0.3)


def test_flops_are_two_a_weight_and_token() -> None:
    spec = resolve.from_catalogue("llama-3.1-8b")
    assert spec.decode_flops(1, 0) == 2 * (spec.parameters - spec.vocab_size * spec.hidden_size - spec.hidden_size)
    assert spec.decode_flops(8, 100) == 8 * spec.decode_flops(1, 100)
    assert spec.prefill_flops(1, 1) == pytest.approx(spec.decode_flops(1, 1), rel=1e-3)
    names = ("bloom-176b", "llama-3.1-70b", "mixtral-8x7b")
    assert [resolve.resolve(name).ffn_matrices for name in names] == [2, 3, 3], "a gate is a third matrix"


def test_a_copy_counts_its_own_layers() -> None:
    whole = resolve.from_catalogue("deepseek-v3")
    names = "streamed_bytes routed_bytes layer_bytes dense_layer_bytes ffn_matrices kv_bytes_per_token"
    figures = attrgetter(*names.split())
    before = figures(whole)
    for copy in (whole.slice(2), whole.with_dtype("float32")):
        anew = ModelSpec.model_validate(copy.model_dump())
        assert figures(copy) == figures(anew) != before
        assert copy == anew


def test_a_slice_cuts_lists_deep_in_the_configuration() -> None:
    pytest.importorskip("transformers.models.minimax_m3_vl")
    sparse = resolve.from_catalogue("minimax-m3").slice(4)
    assert counted(build(sparse)) == sparse.parameters


@pytest.mark.parametrize("layers", [0, 9, -1])
def test_slice_outside_the_model_is_an_error(layers: int) -> None:
    with pytest.raises(ModelError, match="bloom-tiny has 8 layers"):
        resolve.resolve("bloom-tiny", layers=layers)


SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 320}
GATED = SMALL | {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128}
TINY = {
    "bloom": SMALL,
    "opt": SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 128},
    "opt-projected": SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "llama": GATED,
    "llama-tied": GATED | {"tie_word_embeddings": True},
    "gpt_neox": SMALL | {"intermediate_size": 96, "max_position_embeddings": 128},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 320, "n_positions": 128},
    "falcon": SMALL | {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon-multiquery": SMALL | {"multi_query": True, "new_decoder_architecture": False},
    "falcon-alibi": SMALL | {"multi_query": False, "new_decoder_architecture": False, "alibi": True, "bias": True},
    "qwen2": GATED,
    "mixtral": GATED | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Saved:
    """Provide a tiny random model saved by transformers: (kind, the model, its folder)."""
    kind = request.param
    config = AutoConfig.for_model(kind.split("-")[0], **TINY[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    return kind, model, tmp_path


@pytest.mark.parametrize("saved", TINY, indirect=True)
def test_saved_checkpoints_are_counted_exactly(saved: Saved) -> None:
    kind, model, folder = saved
    spec = resolve.resolve(str(folder))
    layers = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 3)
    assert (spec.parameters, spec.layer_parameters) == (counted(model), tuple(map(counted, layers)))
    assert spec.expert_parameters == (3 * 4 * 64 * 96 if kind == "mixtral" else 0)
    assert spec.architecture == kind.split("-")[0]
    assert (spec.dtype, spec.directory, spec.total_layers) == ("bfloat16", str(folder), 3)
    assert spec.kv_bytes_per_token == cached_bytes_per_token(spec)
    assert resolve.resolve(str(folder), dtype="float32", layers=1).weight_bytes < 4 * spec.parameters


BUFFERS: dict[str, dict[str, tuple[int, ...]]] = {
    "bloom": {"lm_head.weight": (320, 64)},
    "gpt2": {"transformer.h.0.attn.bias": (1, 1, 8, 8), "transformer.h.0.attn.masked_bias": (1,)},
    "gpt_neox": {"gpt_neox.layers.1.attention.bias": (8, 8), "gpt_neox.layers.1.attention.rotary_emb.inv_freq": (8,)},
    "llama": {"model.layers.2.self_attn.rotary_emb.inv_freq": (8,)},
}


@pytest.mark.parametrize("saved", BUFFERS, indirect=True)
def test_buffers_and_a_stored_tied_head_do_not_count(saved: Saved) -> None:
    kind, model, folder = saved
    store(folder, stored(folder) | {name: torch.zeros(shape) for name, shape in BUFFERS[kind].items()})
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"tie_word_embeddings": true,', ""))  # as older configurations
    assert resolve.resolve(str(folder)).parameters == counted(model)


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
def test_a_checkpoint_without_some_layer_is_an_error(saved: Saved) -> None:
    _, _, folder = saved
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(ModelError, match="no weights of decoder layer 3 of 4"):
        resolve.resolve(str(folder))


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("qwen/qwen3-32b", "qwen3-32b"),
        ("Llama-3.1-70B", "llama-3.1-70b"),
        ("Qwen/Qwen3-14B", None),
        ("Qwen/Qwen3-32B@main", None),
    ],
)
def test_hub_ids_and_letters_of_any_case_find_the_catalogue(
    reference: str, name: str | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    """No network is asked, and records have one name. A folder of the same name comes first."""
    monkeypatch.setattr("zinfer.checkpoint.hub.config_of", pytest.fail)
    assert resolve.catalogue_name(reference) == name
    wanted = make_sweep({"model": reference, "offload": "cpu"}, "here")
    assert wanted.model == (name or reference,)
    if name is not None:
        assert resolve.resolve(reference) == resolve.from_catalogue(name)
        monkeypatch.chdir(tmp_path)
        Path(reference).mkdir(parents=True)
        assert resolve.catalogue_name(reference) is None


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("bloom-178b", "did you mean 'bloom-"),
        ("Qwen3.5", "did you mean 'qwen3.5-27b'"),
        ("nonsense", "`zinfer plan --list models`"),
        (__file__, "is a file: --model takes the folder"),
        (str(Path(__file__).parent), "config.json is missing"),
    ],
)
def test_resolve_errors_are_one_line(reference: str, says: str) -> None:
    with pytest.raises(ModelError) as error:
        resolve.resolve(reference)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_building_a_model_leaves_its_spec_as_it_was() -> None:
    spec = resolve.resolve("llama-3.1-8b")
    before = deepcopy(spec.config)
    AutoConfig.for_model(**spec.config)  # transformers writes rope_theta into the rope_scaling it is given
    assert resolve.resolve("llama-3.1-8b").config == before
