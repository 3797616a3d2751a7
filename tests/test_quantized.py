"""Quantised checkpoints: weights equal those of transformers and of the formats' libraries, to the bit."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations import finegrained_fp8

from tests import Patch, quantized
from tests.checkpoints import save_checkpoint, save_config
from tests.interpreter import interpreted
from tests.test_parity import greedy, plan_of
from tests.test_parity import load as load_engine
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.quantized_tensors import QuantizedWeight
from zinfer.checkpoint.resolve import from_directory
from zinfer.core.errors import ZinferError
from zinfer.core.model import ModelError
from zinfer.engine.quantization import dequantize as values
from zinfer.engine.quantization.dequantize import Codes, dequantize, expand, table
from zinfer.engine.state import ModelState
from zinfer.engine.stream.weights import codec as lossless
from zinfer.engine.stream.weights.formats import encode_chunks, join, unpack

EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_attention_heads": 4,
    "num_experts_per_tok": 2, "intermediate_size": 64, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def llama(directory: Path) -> Path:
    return save_checkpoint("llama", directory)


def entries(directory: Path) -> dict[str, Tensor]:
    """All entries that zinfer loads from a checkpoint, in its own type."""
    state = ModelState(from_directory(directory), "safetensors")
    return {name: tensor.clone() for name, tensor in state.load(torch.device("cpu"))}


def test_cut_blocks_and_half_bytes_have_their_scales() -> None:
    """Stacked experts whose last block is cut, or that share scales. Rows may end with half a byte."""
    codes = torch.randn(2, 5, 6).to(torch.float8_e4m3fn)
    blocks = torch.rand(2, 3, 2)
    spread = blocks.repeat_interleave(2, 1)[:, :5].repeat_interleave(3, 2)
    for scales, block, expanded in ((blocks, (2, 3), spread), (torch.tensor([0.5]), (5, 6), torch.tensor(0.5))):
        weight = QuantizedWeight("w", "fp8", (2, 5, 6), "F32", {}, block)
        assert torch.equal(dequantize(weight, {"codes": codes, "scales": scales}), codes.float() * expanded)
    words, scales = torch.randint(-(1 << 31), (1 << 31) - 1, (4, 1), dtype=torch.int32), torch.rand(4, 1)
    numbers = torch.cat([(words >> shift & 15) - 8 for shift in range(0, 28, 4)], 1)
    weight = QuantizedWeight("w", "int", (4, 7), "F32", {}, (1, 7), 4)
    assert torch.equal(dequantize(weight, {"codes": words, "scales": scales}), numbers * scales)
    assert not weight.in_whole_bytes


@pytest.mark.parametrize(
    ("method", "bits", "ordered"), [("gptq", 4, False), ("gptq", 4, True), ("gptq", 8, False), ("awq", 4, False)]
)
def test_gptq_and_awq(method: str, bits: int, ordered: bool, tmp_path: Path) -> None:
    directory, expected = quantized.columns(llama(tmp_path / "m"), method, bits, ordered)
    actual = entries(directory)
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight.to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("kind", "separate"),
    [("FP8", False), ("FP8_PER_CHANNEL_PER_TOKEN", True), ("FP8_PB_WO", False), ("NVFP4", False), ("NVFP4", True)],
)
def test_checkpoints_of_modelopt(kind: str, separate: bool, tmp_path: Path) -> None:
    directory, expected = quantized.modelopt(llama(tmp_path / "m"), kind, separate)
    actual = entries(directory)
    assert len(expected) == 21
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name
    for name, plain, several in matrices(directory):
        assert several is not None
        assert torch.equal(torch.cat([expand(codes, plain.dtype) for codes in several]), expected.pop(name)), name
    assert not expected
    assert from_directory(directory).stored_ratio < 0.62


@pytest.mark.parametrize(
    ("name", "offload"),
    [("stream", "cpu"), *(pytest.param(name, "cpu", marks=pytest.mark.slow) for name in ("accelerate", "deepspeed"))],
)
def test_engines_generate_from_quantised_weights(name: str, offload: Any, tmp_path: Path) -> None:
    directory = quantized.fp8(llama(tmp_path / "m"))
    plain = llama(tmp_path / "plain")
    for file in plain.glob("model*"):
        file.unlink()
    save_file(entries(directory), plain / "model.safetensors")
    texts = []
    for folder in (directory, plain):
        engine = load_engine(name, folder, offload, tmp_path, dtype="bfloat16")
        texts.append(greedy(engine, (5, 9, 3)))
        engine.close()  # DeepSpeed knows one at a time
    assert torch.equal(*texts)


STEPS = 8192, 8192  # bytes from one of two matrices to the next, packed and unpacked


def reordered(directory: Path) -> Path:
    """Give each column of a compressed-tensors checkpoint its own group (``actorder``)."""

    def change(tensors: dict[str, Tensor]) -> None:
        dice = torch.Generator().manual_seed(4)
        for name in [key for key in tensors if key.endswith("weight_packed")]:
            columns = int(tensors[name.replace("packed", "shape")][1])
            order = torch.arange(columns, dtype=torch.int32) // 16
            tensors[name.replace("packed", "g_idx")] = order[torch.randperm(columns, generator=dice)]

    damaged(directory, change)

    def order(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    return quantized.edit_config(directory, order)


FORMATS: dict[str, Callable[[Path], Path]] = {
    "fp8": lambda directory: quantized.fp8(llama(directory)),
    "fp8 of tensors": lambda directory: quantized.fp8(llama(directory), None),
    "fp8 of half blocks": lambda directory: quantized.fp8(llama(directory), (16, 32)),
    "fp8 of experts": lambda directory: quantized.fp8(save_checkpoint("mixtral", directory)),
    "fp4 of experts": lambda directory: quantized.fp8(save_checkpoint("mixtral", directory), fp4_experts=True),
    **{kind: partial(lambda kind, directory: quantized.compressed(llama(directory), kind), kind)
       for kind in quantized.COMPRESSED},
    "gptq": lambda directory: quantized.columns(llama(directory), "gptq")[0],
    "gptq in order": lambda directory: quantized.columns(llama(directory), "gptq", ordered=True)[0],
    "gptq of 8 bits": lambda directory: quantized.columns(llama(directory), "gptq", 8)[0],
    "awq": lambda directory: quantized.columns(llama(directory), "awq")[0],
    **{f"modelopt {kind}": partial(lambda kind, directory: quantized.modelopt(llama(directory), kind)[0], kind)
       for kind in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")},
    "mxfp4 of experts": lambda directory: quantized.mxfp4(save_config(directory, "gpt_oss", **EXPERTS)),
    "int4 in order": lambda directory: reordered(quantized.compressed(llama(directory), "int4 asymmetric")),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make a checkpoint of one of `FORMATS`, once."""
    folder = tmp_path_factory.mktemp("formats")

    @cache
    def make(name: str) -> Path:
        if name in quantized.COMPRESSED:
            pytest.importorskip("compressed_tensors")
        return FORMATS[name](folder / name)

    return make


fp8_config = partial(FineGrainedFP8Config, "dynamic", dequantize=True)
LIBRARIES: dict[str, Any] = {  # configurations with which transformers dequantises formats itself
    **dict.fromkeys(("fp8", "fp8 of experts", "fp4 of experts"), fp8_config([32, 32])),
    "fp8 of tensors": fp8_config(None),
    "fp8 of half blocks": fp8_config([16, 32]),
    "mxfp4 of experts": Mxfp4Config(dequantize=True),
    **{kind: CompressedTensorsConfig(dequantize=True) for kind in quantized.COMPRESSED},
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_weights_are_those_of_transformers(name: str, made: Callable[[str], Path], monkeypatch: Patch) -> None:
    if name == "fp4 of experts" and not hasattr(finegrained_fp8.Fp8Dequantize, "_unpack_fp4"):
        pytest.skip("this version of transformers does not read FP4")
    monkeypatch.setattr(values, "VALUES_AT_ONCE", 3000)  # several steps
    directory = made(name)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, quantization_config=LIBRARIES[name])
    expected, loaded = model.state_dict(), entries(directory)
    assert loaded.keys() <= expected.keys()
    for entry, tensor in loaded.items():
        assert tensor.dtype == expected[entry].dtype, entry
        assert torch.equal(tensor, expected[entry].to("cpu")), entry


def matrices(directory: Path) -> Iterator[tuple[str, Tensor, tuple[Codes, ...] | None]]:
    """Yield the entries of the layers that come from codes: name, dequantised, and as they are stored."""
    state = ModelState(from_directory(directory), "safetensors")
    plain = entries(directory)
    for name, loaded in state.load(torch.device("cpu"), stored=True):
        if not isinstance(loaded, Tensor):
            whole = plain[name].mT.contiguous() if loaded[0].transposed else plain[name]
            yield name, whole, tuple(codes.to(torch.device("cpu")) for codes in loaded)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_cross_the_link_as_they_are_stored(name: str, made: Callable[[str], Path]) -> None:
    loaded = list(matrices(made(name)))
    assert loaded
    for entry, expected, several in loaded:
        out, offset = torch.empty_like(expected).view(-1), 0
        for codes in several or ():
            for layout, data in encode_chunks(codes, expected.dtype, 4000):
                unpack(data, layout, out[offset : offset + layout.numel])
                offset += layout.numel
        assert offset == expected.numel()
        assert torch.equal(out.view(expected.shape), expected), entry


@pytest.mark.parametrize("name", ["fp8 of experts", "fp8", "int4 groups", "nvfp4", "gptq in order"])
def test_matrices_of_an_entry_are_joined_where_their_scales_allow_it(
    name: str, made: Callable[[str], Path], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(lossless, "MIN_NUMEL", 0)
    monkeypatch.setattr(lossless, "BLOCK", 1024)
    monkeypatch.setattr(lossless, "MAX_ESCAPES", 1024 - 64)
    for entry, expected, several in matrices(made(name)):
        assert several
        for max_bytes in (1 << 30, 20_000):
            whole = list(join(several, expected.dtype.itemsize, max_bytes))
            assert all(codes.rows * codes.columns * 2 <= max_bytes for codes in whole) or len(whole) == len(several)
            assert len(whole) == 1 or max_bytes < 1 << 30, entry
            out, offset, coded = torch.empty_like(expected).view(-1), 0, 0
            for codes in whole:
                for layout, data in encode_chunks(codes, expected.dtype, max_bytes, 2 * offset):
                    unpack(data.clone(), layout, out[offset : offset + layout.numel])
                    offset, coded = offset + layout.numel, coded + (layout.coded is not None)
            assert torch.equal(out.view(expected.shape), expected), entry
            assert (coded > 0) == name.startswith("fp8"), entry


# Every branch of the kernel.
BRANCHES = "fp8 of tensors", "int4 asymmetric", "nvfp4", "gptq", "gptq in order", "mxfp4 of experts"


@pytest.mark.parametrize("names", [BRANCHES, pytest.param(tuple(FORMATS), marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_kernel_unpacks_every_format(names: tuple[str, ...], made: Callable[[str], Path], tmp_path: Path) -> None:
    jobs = []
    for name in names:
        entry = next(iter(matrices(made(name))), None)
        if entry is not None and entry[2]:
            chunks = encode_chunks(entry[2][0], entry[1].dtype, 500)  # few rows: the interpreter is slow
            (layout, data), values = chunks[0], entry[1].flatten(0, -2)
            expected = [values[: min(2, layout.rows)]]
            if len(chunks) > 1 and chunks[1][0] == layout:  # two matrices in one launch
                data = torch.cat([data, data.new_full((STEPS[0] - len(data),), 127), chunks[1][1]])
                expected.append(values[layout.rows :][: len(expected[0])])
            jobs.append((name, layout, data, expected))
    torch.save(jobs, tmp_path / "jobs")
    interpreted(__name__, tmp_path)
    for (name, _, _, expected), actual in zip(jobs, torch.load(tmp_path / "results"), strict=True):
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected)), name
    assert max(len(expected) for *_, expected in jobs) == 2


@pytest.mark.parametrize("name", ["fp8 of experts", "int4 groups", "mxfp4 of experts", "gptq in order"])
def test_streamed_codes_give_the_tokens_of_dequantised_weights(name: str, made: Callable[[str], Path]) -> None:
    ways = [load_engine("stream", made(name), dtype="bfloat16", weight_codec=codec) for codec in ("none", "lossless")]
    assert torch.equal(*(greedy(engine, (5, 9, 3)) for engine in ways))
    spec, effective = from_directory(made(name)), ways[1].effective()
    assert spec.stored_ratio < 0.62
    assert effective.wire_bytes_per_step == pytest.approx(spec.stored_ratio * spec.streamed_bytes, rel=0.15)
    assert effective.host_weight_bytes < 0.75 * spec.streamed_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_a_bare_config_counts_the_bytes_of_the_headers(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    """Formats are known from config.json alone; the plan is that of the checkpoint, to the byte, but for scales of
    activations that ModelOpt stores, and for blocks whose size it does not."""
    directory = made(name)
    bare = tmp_path / "config.json"
    bare.write_bytes((directory / "config.json").read_bytes())
    actual, expected = from_directory(bare), from_directory(directory)
    exact = not name.startswith("modelopt")
    assert actual.stored_ratio == pytest.approx(expected.stored_ratio, rel=0.0 if exact else 0.02)
    assert actual.stored_ratio < 0.9
    plans = [plan_of(spec, weight_codec="lossless") for spec in (actual, expected)]
    assert plans[0].host.total == pytest.approx(plans[1].host.total, rel=0.0 if exact else 0.02)
    assert plans[0].streamed_bytes == pytest.approx(plans[1].streamed_bytes, rel=0.0 if exact else 0.02)
    assert plans[0].streamed_bytes < 0.9 * actual.streamed_bytes


def damaged(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def refused(directory: Path, cases: Mapping[str, Callable[[dict[str, Tensor]], None]]) -> None:
    """Damage a checkpoint in each way; it is refused, also where its codes would cross the link as they are."""
    content = (directory / "model.safetensors").read_bytes()
    for says, change in cases.items():
        (directory / "model.safetensors").write_bytes(content)
        damaged(directory, change)
        for stored in (False, True):
            with pytest.raises(ZinferError, match=says) as fault:
                deque(ModelState(from_directory(directory), "safetensors").load(torch.device("cpu"), stored=stored))
            assert "\n" not in str(fault.value)


UP = "model.layers.1.mlp.up_proj.weight"
Change = Callable[[dict[str, Tensor]], None]


def put(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


def at(name: str, index: Any, value: float) -> Change:
    return lambda tensors: tensors[name].__setitem__(index, value)


def cut(name: str, columns: int) -> Change:
    return lambda tensors: tensors.update({name: tensors[name][:, :columns].contiguous()})


def test_damaged_scales_are_refused_in_a_line(tmp_path: Path) -> None:
    scale = f"{UP}_scale_inv"
    refused(quantized.fp8(llama(tmp_path / "m")), {
        "without their scales": lambda tensors: tensors.__delitem__(scale),
        "does not divide a weight of 96 x 64": put(scale, torch.ones(7, 2)),
        "its type should be": put(scale, torch.ones(3, 2, dtype=torch.int32)),
        "NaN or infinity": at(scale, (1, 1), float("nan")),
        "holds NaN or infinity": at(scale, (1, 1), 3e38),
        "holds no codes of a quantised weight": put("model.layers.1.input_layernorm.weight_scale_inv", torch.ones(1)),
    })  # fmt: skip


def test_damaged_checkpoints_of_modelopt_are_refused_in_a_line(tmp_path: Path) -> None:
    directory = quantized.modelopt(llama(tmp_path / "m"), "NVFP4", separate=True)[0]
    refused(directory, {
        "its global scale": lambda tensors: tensors.__delitem__(f"{UP}_scale_2"),
        "should be \\[96, 4\\]": cut(f"{UP}_scale", 2),
        "is not one number": put(f"{UP}_scale_2", torch.ones(2)),
    })  # fmt: skip
    (directory / "hf_quant_config.json").write_text('{"quantization": 4}')
    with pytest.raises(ModelError, match="has no object 'quantization'"):
        from_directory(directory)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed"])
def test_damaged_groups_are_refused_in_a_line(method: str, tmp_path: Path) -> None:
    base = UP.removesuffix("weight")
    if method == "compressed":
        pytest.importorskip("compressed_tensors")
        directory = quantized.compressed(llama(tmp_path / "m"), "int4 groups")
        refused(directory, {
            "for a weight of": put(f"{UP}_shape", torch.tensor([96, 1 << 40])),
            "does not divide": cut(f"{UP}_scale", 3),
        })  # fmt: skip
        return
    order: dict[str, Change] = {"a column names a group that has no scale": at(f"{base}g_idx", 3, 4)}
    directory = quantized.columns(llama(tmp_path / "m"), method)[0]
    refused(directory, (order if method == "gptq" else {}) | {"its shape should be": cut(f"{base}scales", 3)})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'"),
        ({"quant_method": ["fp8"]}, "quantised by"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ({"quant_method": "gptq", "bits": 3}, "'3' bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ's order 'gemv'"),
        ("fp8", "no object"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' of ModelOpt"),
    ],
)
def test_other_ways_are_refused_in_a_line(config: Any, says: str, tmp_path: Path) -> None:
    directory = llama(tmp_path / "m")
    quantized.edit_config(directory, lambda content: content.update(quantization_config=config))
    with pytest.raises(ModelError, match=says) as fault:
        from_directory(directory)
    assert "\n" not in str(fault.value)
    with pytest.raises((ModelError, CheckpointError), match=says):
        entries(directory)


def main(folder: Path) -> None:
    """Unpack the jobs of a folder by the kernel."""
    from zinfer.engine.stream.weights.expand import launch

    results = []
    for _, layout, data, expected in torch.load(folder / "jobs", weights_only=False):
        codes, like = layout.views(data[: layout.size]), expected[0]
        codes = replace(codes, numbers=codes.numbers[: len(like)])
        out = torch.full((STEPS[1] // like.itemsize * len(expected),), float("nan"), dtype=like.dtype)
        scale_table = table(codes.scale_table, out.device) if codes.scale_table else None
        first = out[: like.numel()].view_as(like)
        launch(codes, first, table(codes.table, out.device), scale_table, 64, len(expected), STEPS)
        parts = out.view(len(expected), -1)
        assert parts[:, like.numel() :].isnan().all()
        results.append([part[: like.numel()].view_as(like) for part in parts])
    torch.save(results, folder / "results")
