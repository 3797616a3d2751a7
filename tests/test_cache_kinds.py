"""KV cache of every kind of layer: greedy tokens equal those of `transformers.generate`, wherever the cache is."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from tests import Patch
from tests.checkpoints import VOCAB_SIZE, once
from tests.grid import covering
from tests.running import decode, error, prefill
from tests.test_parity import OUTPUT_LEN, greedy, load, prompts
from tools.conformance.small import Subject, save, small_model
from zinfer.core.model import ATTEND_THEMSELVES, ModelError
from zinfer.engine import EngineError
from zinfer.engine import cache as kv_cache
from zinfer.engine.cache import MIN_SPARE, CacheFullError, FixedLayer, QuantizedLayer, RowCache, make_cache

LENGTHS = (13, 5, 9)  # of the prompts: longer than the windows, and shorter
_SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96, "vocab_size": VOCAB_SIZE, "head_dim": 16}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_SHAPE: dict[str, Any] = {**_SIZES, **_HEADS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ALTERNATE = ["sliding_attention", "full_attention"] * 3
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},  # a window in every layer
    "gemma2": {"sliding_window": 6, "layer_types": _ALTERNATE, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 6, "layer_types": _ALTERNATE, "query_pre_attn_scalar": 16},
    "gpt_oss": {  # sinks
        "sliding_window": 6, "layer_types": _ALTERNATE, "num_local_experts": 2, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96},  # chunks
    "deepseek_v3": {  # K and V of different widths
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2,
        "moe_intermediate_size": 32, "num_key_value_heads": 4, "head_dim": 8,
    },
    "qwen3_next": {  # a state of fixed size in three layers of four
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "jamba": {**_MAMBA, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
                  "time_step_limit": [0.0, 1e9]},  # both in every layer
    "mamba": {"state_size": 8},  # states only
    "gemma4_text": {  # later layers attend to keys of earlier ones
        "sliding_window": 6, "layer_types": _ALTERNATE, "num_kv_shared_layers": 2, "global_head_dim": 32,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE,
    },
}  # fmt: skip
STATES_ONLY = ("mamba",)
ALIKE = ("gemma3_text", "jamba", "lfm2")  # other models with the layers of one before

Kinds = Callable[[str], Path]


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Make the checkpoint of one of `KINDS`, once."""

    def save(name: str, folder: Path) -> None:
        config = AutoConfig.for_model(name, **(_SHAPE | KINDS[name]), initializer_range=0.3)
        if len(DynamicCache(config=config).layers) < config.num_hidden_layers:
            pytest.skip(
                "this transformers has no cache layer where keys are shared: it serves rows of one length alone"
            )
        _save(folder, config)

    return once(tmp_path_factory, save)


def _save(folder: Path, config: Any) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


@cache
def expected(directory: Path, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Return the tokens that `transformers.generate` adds to a batch, ``[B, OUTPUT_LEN]``."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    token_ids, mask = prompts(lengths)
    output: Tensor = model.generate(token_ids, attention_mask=mask, max_new_tokens=OUTPUT_LEN, do_sample=False)
    return output[:, token_ids.shape[1] :]


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "cpu": ("cpu", {}),
    "kv by the cpu": ("cpu", {"kv_offload": "cpu", "kv_attention": "cpu"}),
    "kv over the link": ("cpu", {"kv_offload": "cpu", "kv_attention": "gpu"}),
}


@pytest.mark.parametrize("at_once", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *covering([name for name in KINDS if name not in ALIKE], [*WAYS]),
        *(pytest.param(name, way, marks=pytest.mark.slow) for name in ALIKE for way in WAYS),
    ],
)
def test_tokens_are_those_of_transformers(
    name: str, way: str, at_once: int, kind: Kinds, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("zinfer.engine.cache.MIN_SPARE", 2)  # the window moves every other step
    offload, options = WAYS[way]
    if options and name in (*STATES_ONLY, *ATTEND_THEMSELVES):
        why = "fixed size" if name in STATES_ONLY else "computes attention itself"
        with pytest.raises(EngineError, match=f"{why}.* kv_offload=cpu"):
            load("stream", kind(name), offload, tmp_path, **options)
        return
    engine = load("stream", kind(name), offload, tmp_path, tokens=max(LENGTHS) * at_once, **options)
    for _ in range(2):
        assert torch.equal(greedy(engine, LENGTHS), expected(kind(name)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gemma2", "deepseek_v3", "qwen3_next", "mamba")))
        for name in KINDS
    ],
)
def test_8_bits_are_what_the_record_says(name: str, kind: Kinds, monkeypatch: Patch) -> None:
    monkeypatch.setattr("zinfer.engine.stream.passes.DEQUANTIZED_BYTES", 1)  # a row at a time
    monkeypatch.setattr("zinfer.engine.cache.MIN_SPARE", 2)
    if name in STATES_ONLY:
        with pytest.raises(EngineError, match=r"no keys and values.* kv_cache_dtype=int8"):
            load("stream", kind(name), "cpu", kv_cache_dtype="int8")
        return
    ways: list[dict[str, Any]] = [{"kv_cache_dtype": "int8"}]
    if name not in ATTEND_THEMSELVES:
        ways.append({"kv_cache_dtype": "int8", "kv_offload": "cpu"})
    exact = load("stream", kind(name), "cpu")
    for way in ways:
        engine = load("stream", kind(name), "cpu", **way)
        logits = [prefill(loaded, *prompts(LENGTHS), reserve=OUTPUT_LEN) for loaded in (engine, exact)]
        assert torch.allclose(logits[0], logits[1], atol=1e-3), "the prompt's attention sees exact keys"
        errors = []
        for _ in range(OUTPUT_LEN - 1):
            token = logits[1].argmax(-1)
            logits = [decode(loaded, token) for loaded in (engine, exact)]
            errors.append(error(*logits))
        assert max(errors) > 0
        assert sum(errors) / len(errors) < 0.1
        assert engine.effective().settings["kv_cache_dtype"] == "int8"


def test_a_sliding_window_layer_reads_and_keeps_its_window_only(kind: Kinds) -> None:
    """The prompt has 40 tokens, the window 8: the cache stores 7, and a step adds to the 7 tokens before it."""
    over_link, by_cpu, on_device = (
        load("stream", kind("mistral"), "cpu", **WAYS[way][1]) for way in ("kv over the link", "kv by the cpu", "cpu")
    )
    for engine in (over_link, by_cpu, on_device):
        assert torch.equal(greedy(engine, (40, 33)), expected(kind("mistral"), (40, 33)))
    a_token = 2 * 2 * 16 * 4  # of a layer, in bytes
    assert over_link.effective().settings["kv_bytes_per_step"] == 6 * 2 * 7 * a_token
    room = 6 * 2 * (7 + MIN_SPARE) * a_token
    for engine in (over_link, by_cpu):
        assert sum(block.size for block in engine.batches[0].host._blocks.values()) == room
    layers = on_device.batches[0].cache.layers
    assert sum(part.nbytes for layer in layers for part in layer.memories) == room
    assert {layer.keys.shape[2] for layer in layers} == {7}
    assert "the last 8 positions only" in str(on_device.cannot_snapshot())


def test_a_model_without_a_cache_is_refused(tmp_path: Path) -> None:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64}
    _save(tmp_path, AutoConfig.for_model("openai-gpt", **(_SHAPE | sizes)))
    with pytest.raises(ModelError, match="OpenAIGPTLMHeadModel"):
        load("stream", tmp_path, "none")


@pytest.mark.parametrize("option", [{"kv_cache_dtype": "int8"}, {"kv_offload": "cpu"}])
def test_other_states_than_keys_and_values_are_kept_or_refused(option: dict[str, Any], tmp_path: Path) -> None:
    """Blocks of keys have no 8-bit form and no host memory."""
    save(small_model(Subject("minimax_m3_vl_text")), tmp_path)
    with pytest.raises(EngineError, match=r"\(MiniMaxM3VLSparseCacheLayer\).* " + next(iter(option))):
        load("stream", tmp_path, "cpu", **option)
    engine = load("stream", tmp_path, "cpu")
    greedy(engine, (9, 9))
    assert engine.effective().settings["kv_host_rows"] == 0
    assert "another state" in str(engine.cannot_snapshot())
    with pytest.raises(EngineError, match="keeps its cache whole, and knows no padding"):
        prefill(engine, *prompts(LENGTHS), reserve=4)


@pytest.mark.parametrize("name", ["minimax", "recurrent_gemma"])  # the latter's states are in its modules
def test_a_model_with_a_cache_of_its_own_kind_runs_with_that(name: str, tmp_path: Path) -> None:
    settings = {"initializer_range": 0.3, "block_size": 8, "bos_token_id": None}
    settings |= {"num_local_experts": 2} if name == "minimax" else {"attention_window_size": 16, "lru_width": 64}
    _save(tmp_path, AutoConfig.for_model(name, **(_SHAPE | settings)))
    engine = load("stream", tmp_path, "cpu", tokens=1)  # a row at a time, if that were possible
    for _ in range(2):
        assert torch.equal(greedy(engine, (13, 13, 13)), expected(tmp_path, (13, 13, 13)))
    with pytest.raises(EngineError, match="knows no padding"):
        prefill(engine, *prompts(LENGTHS), reserve=4)
    with pytest.raises(EngineError, match=r"of its own kind.* kv_cache_dtype=int8"):
        load("stream", tmp_path, "cpu", kv_cache_dtype="int8")


@pytest.mark.parametrize("reserve", [12, 99])
def test_a_model_that_adds_tokens_of_its_own_is_refused(reserve: int, tmp_path: Path) -> None:
    _save(tmp_path, AutoConfig.for_model("cpmant", **_SHAPE, dim_head=16, dim_ff=96, prompt_types=4))
    engine = load("stream", tmp_path, "cpu")
    with pytest.raises(EngineError, match="other tokens"):
        prefill(engine, *prompts((13, 13, 13)), reserve=reserve)


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(2, 40),
    counts=st.lists(st.sampled_from([1, 1, 1, 2, 5, 30, 70]), min_size=1, max_size=40),
    storage=st.sampled_from([None, torch.int8]),
)
def test_a_window_equals_that_of_transformers(window: int, counts: list[int], storage: torch.dtype | None) -> None:
    """Append any number of tokens at a time. For the first two rows and then for the third."""
    generator, capacity = torch.Generator().manual_seed(window), sum(counts)
    layer = FixedLayer(3, capacity, window) if storage is None else QuantizedLayer(3, capacity, window)
    theirs = DynamicSlidingWindowLayer(sliding_window=window)
    for count in counts:
        keys, values = (torch.randn(3, 2, count, width, generator=generator) for width in (6, 4))
        length = theirs.get_seq_length()
        assert layer.get_mask_sizes(count) == theirs.get_mask_sizes(count)
        expected = theirs.update(keys, values)
        seen = []
        for rows in (slice(0, 2), slice(2, 3)):
            layer.window(rows, length)
            assert layer.get_seq_length() == length
            seen.append(layer.update(keys[rows], values[rows]))
        for seen_states, exact in zip(map(torch.cat, zip(*seen, strict=True)), expected, strict=True):
            assert seen_states.shape == exact.shape
            assert torch.allclose(seen_states, exact, atol=0.0 if storage is None else 0.05)
        layer.window(slice(0, 3), length + count)
    with pytest.raises(CacheFullError, match=f"holds {capacity} tokens"):
        layer.update(keys[:, :, :1], values[:, :, :1])


def _chunks(made: RowCache) -> list[list[int]]:
    """Return the bytes of each memory chunk, and its layers."""
    chunks: dict[int, list[int]] = {}
    for index, layer in made.attention.items():
        storages = [memory.untyped_storage() for memory in layer.memories]
        chunks.setdefault(storages[0].data_ptr(), [sum(part.nbytes() for part in storages)]).append(index)
    return list(chunks.values())


def _filled(config: Any, rows: int, storage: str = "auto", width: Callable[[int], int] = lambda _: 16) -> RowCache:
    """A cache for 32 tokens, with 5 in each layer: of row r, r."""
    made = make_cache(config, rows, 32, storage)
    assert isinstance(made, RowCache)
    for index, layer in made.attention.items():
        states = torch.arange(rows)[:, None, None, None].expand(rows, 2, 5, width(index)).to(torch.bfloat16)
        layer.update(states, states)
    return made


@pytest.mark.parametrize("storage", ["auto", "int8"])
def test_memory_is_taken_for_several_layers_at_a_time(storage: str, monkeypatch: Patch) -> None:
    """Whole layers fill a chunk, without a spare byte. Rows that stay have chunks of their own."""
    config = AutoConfig.for_model("llama", **{**_SHAPE, "num_hidden_layers": 7})
    row = 2 * 2 * 32 * (16 * 2 if storage == "auto" else 16 + 4)
    monkeypatch.setattr(kv_cache, "CHUNK_BYTES", 19 * row)
    made = _filled(config, 6, storage)
    assert _chunks(made) == [[18 * row, 0, 1, 2], [18 * row, 3, 4, 5], [6 * row, 6]]
    kept = torch.tensor([0, 2, 3, 5])
    made.keep_rows(kept, 5)
    assert _chunks(made) == [[16 * row, 0, 1, 2, 3], [12 * row, 4, 5, 6]]
    new = torch.zeros(4, 2, 1, 16, dtype=torch.bfloat16)
    for layer in made.attention.values():
        for states in layer.update(new, new):
            assert torch.equal(states[:, 1, :5, 7].round(), kept[:, None].expand(4, 5).to(torch.bfloat16))
    made.keep_rows(torch.tensor([], dtype=torch.long), 6)
    assert sum(size for size, *_ in _chunks(made)) == 0


def test_layers_with_a_window_take_less_of_a_chunk(monkeypatch: Patch) -> None:
    monkeypatch.setattr(kv_cache, "MIN_SPARE", 3)
    config = AutoConfig.for_model("gemma2", **_SHAPE, sliding_window=6, layer_types=_ALTERNATE)
    whole, window = (2 * 4 * 2 * room * 16 * 2 for room in (32, 8))
    monkeypatch.setattr(kv_cache, "CHUNK_BYTES", 2 * (whole + window))
    assert _chunks(_filled(config, 4)) == [[3 * window, 0, 2, 4], [2 * whole, 1, 3], [whole, 5]]


def test_layers_that_differ_in_their_heads_take_their_own_memory() -> None:
    """The first chunk was taken for layers like the first; it holds as many as it can."""
    each = 2 * 4 * 2 * 32 * 2
    chunks = _chunks(_filled(AutoConfig.for_model("llama", **_SHAPE), 4, width=lambda index: 16 if index < 2 else 48))
    assert chunks == [[6 * 16 * each, 0, 1], [4 * 48 * each, 2, 3, 4, 5]]
