"""GGUF files: weights are those of the package gguf to the bit, text is that of transformers with these weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf", reason="pip install 'zinfer[gguf]'")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoTokenizer  # noqa: E402
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: E402

from tests import ggufs, smollm2  # noqa: E402
from tests.command import zinfer  # noqa: E402
from tests.ggufs import MODELS, Kind  # noqa: E402
from tests.interpreter import interpreted  # noqa: E402
from tests.test_parity import greedy, plan_of, prompts  # noqa: E402
from tests.test_parity import load as load_engine  # noqa: E402
from tools import random_gguf  # noqa: E402
from zinfer.checkpoint import gguf as reader  # noqa: E402
from zinfer.checkpoint import tokenizer_files  # noqa: E402
from zinfer.checkpoint.headers import Checkpoint, CheckpointError  # noqa: E402
from zinfer.checkpoint.resolve import resolve  # noqa: E402
from zinfer.checkpoint.source import find  # noqa: E402
from zinfer.core.model import ModelError, ModelSpec  # noqa: E402
from zinfer.engine.quantization.dequantize import Codes, block_codes, expand  # noqa: E402
from zinfer.engine.state import ModelState  # noqa: E402
from zinfer.engine.stream.weights.formats import encode_chunks, unpack  # noqa: E402
from zinfer.generation.tokenizer import load_tokenizer  # noqa: E402
from zinfer.plan.times import RATES, Timing  # noqa: E402
from zinfer.system import machines  # noqa: E402

TYPES = [Kind[name] for name in (*reader.BLOCKS, *reader.VALUES)]
BITS = {kind.name: 8 * width / size for kind, (size, width) in gguf.GGML_QUANT_SIZES.items()}
LENGTHS = (5, 30, 3)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def entries(path: Path, stored: bool = False) -> dict[str, Any]:
    """All entries that zinfer loads, in float32; with `stored` as they cross the link."""
    state = ModelState(resolve(str(path), "float32"), "safetensors")
    loaded = state.load(torch.device("cpu"), stored=stored)
    return {name: tensor.clone() if isinstance(tensor, Tensor) else tensor for name, tensor in loaded}


def check_weights(path: Path, model: Any) -> None:
    expected, loaded = model.state_dict(), entries(path)
    assert loaded.keys() <= expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name


def random_blocks(kind: Any, rows: int = 3, blocks: int = 2) -> Tensor:
    """Random bytes of blocks, whose factors are finite."""
    _, width = gguf.GGML_QUANT_SIZES[kind]
    made = torch.randint(0, 256, (rows, blocks, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if kind == Kind.MXFP4:
        made[..., 0] %= 255
        made[0, :, 0] = torch.tensor([0, 254])[:blocks]  # the smallest and the largest power
    return made.flatten(1)


@pytest.mark.parametrize("kind", [Kind[name] for name in reader.BLOCKS], ids=lambda kind: kind.name)
def test_blocks_are_dequantised_as_by_the_package(kind: Any) -> None:
    """All bytes are tried, also factors that no quantiser writes; parts of rows cross the link as they are stored."""
    blocks = random_blocks(kind, rows=200)
    codes = block_codes(kind.name, blocks)
    if kind.name != "MXFP4":  # whose scales are looked at
        assert block_codes(kind.name, blocks.to("meta")).numbers.is_meta, "they stay on their device, a GPU perhaps"
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))
    values = expand(codes, torch.float32)
    same = (values == expected) | (values.isnan() & expected.isnan())
    assert same.all()
    out, offset = torch.empty_like(expected).view(-1), 0
    for layout, data in encode_chunks(codes, torch.float32, 4000):
        unpack(data, layout, out[offset : offset + layout.numel])
        offset += layout.numel
    assert torch.equal(out.view_as(expected).nan_to_num(), expected.nan_to_num())


def test_the_kernel_unpacks_every_type(tmp_path: Path) -> None:
    jobs, dice = [], np.random.default_rng(1)
    for name in reader.BLOCKS:
        values = dice.standard_normal((3, 512), np.float32)
        blocks = torch.from_numpy(ggufs.stored(values, Kind[name], dice))
        expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), Kind[name]))
        codes = block_codes(name, blocks)
        ((layout, data),) = encode_chunks(codes, torch.float32, codes.rows * codes.columns * 4)
        jobs.append((name, layout, data, [expected]))
    torch.save(jobs, tmp_path / "jobs")
    interpreted("tests.test_quantized", tmp_path)
    for (name, _, _, [dequantized]), [actual] in zip(jobs, torch.load(tmp_path / "results"), strict=True):
        assert torch.equal(actual, dequantized), name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_weights_are_those_of_the_package(name: str, kind: Any, file: Path) -> None:
    check_weights(file, ggufs.write(name, file, kind))


def expected_text(model: Any) -> Tensor:
    ids, mask = prompts(LENGTHS)
    model.generation_config.eos_token_id = None
    text: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    return text[:, ids.shape[1] :]


@pytest.mark.parametrize(("number", "name"), enumerate(MODELS))
def test_text_is_that_of_transformers(number: int, name: str, file: Path) -> None:
    kind = Kind.MXFP4 if name == "gpt-oss" else TYPES[number % len(TYPES)]
    model = ggufs.write(name, file, kind)
    engine = load_engine("stream", file, weight_codec="lossless")
    assert torch.equal(greedy(engine, LENGTHS), expected_text(model))
    spec, effective = engine.plan.model, engine.effective()
    if kind.name in reader.BLOCKS:
        assert effective.wire_bytes_per_step == pytest.approx(spec.stored_ratio * spec.streamed_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("name", "kind", "down"),
    [("mixtral", "Q4_0", ""), ("qwen3moe", "Q8_0", ""), ("qwen3moe", "Q5_K", ""), ("mixtral", "Q4_K", "Q6_K"),
     ("qwen2moe", "Q4_1", "F16"), ("gpt-oss", "MXFP4", "")],
)  # fmt: skip
def test_experts_come_on_demand_or_are_computed_by_the_cpu(name: str, kind: str, down: str, file: Path) -> None:
    if name not in MODELS:
        pytest.skip("this version of transformers does not map it")
    expected = expected_text(ggufs.write(name, file, Kind[kind], down=Kind[down] if down else None))
    for experts in ("on-demand", "cpu"):
        engine = load_engine("stream", file, weight_codec="lossless", experts=experts)
        assert torch.equal(greedy(engine, LENGTHS), expected)
        settings = engine.effective().settings
        on_cpu = float(str(settings.get("experts_on_cpu_per_step", 0)))
        assert (on_cpu > 0) == (experts == "cpu")
        assert settings.get("cpu_experts", "on") == "on"


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gpt-oss", "mixtral")])
def test_the_configuration_is_that_of_transformers(name: str, file: Path) -> None:
    """Fields that transformers reads are taken; the model is the written one."""
    wanted = ggufs.write(name, file, Kind.F16, tokens="gpt2").config.to_dict()
    ours, theirs = dict(Checkpoint.open(file).config), load_gguf_checkpoint(str(file))["config"]
    theirs.pop("_model_name_or_path")
    assert {key: ours[key] for key in theirs} == theirs
    built = ModelState(resolve(str(file)), "safetensors").model.config.to_dict()
    differing = {key for key in wanted if "token" not in key and wanted[key] != built.get(key)}
    other = {key for key in differing if not key.endswith(("eps", "epsilon"))}
    assert other <= {"dtype", "initializer_range", "architectures"}


def test_only_changed_weights_are_dense(file: Path) -> None:
    """Queries and keys of Llama are put in order as codes."""
    ggufs.write("llama", file, Kind.Q4_0)
    loaded = entries(file, stored=True)
    coded = {name for name, value in loaded.items() if not isinstance(value, Tensor)}
    assert coded == {name for name in loaded if ".layers." in name and "norm" not in name}
    codes: Codes = loaded["model.layers.0.self_attn.q_proj.weight"][0]
    assert 8 * (codes.numbers.nbytes + codes.scales.nbytes) == 4.5 * 256 * 256
    ggufs.write("qwen3moe", file, Kind.Q8_0)
    loaded = entries(file, stored=True)
    assert len(loaded["model.layers.1.mlp.experts.gate_up_proj"]) == 8  # gate and up of four experts


def test_files_in_parts_and_folders_are_read(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole" / "m.gguf", tmp_path / "split"
    for folder in (whole.parent, split):
        folder.mkdir()
    ggufs.write("qwen3", whole, Kind.Q8_0)
    model = ggufs.write("qwen3", split / "m.gguf", Kind.Q8_0, split=6)
    parts = sorted(split.iterdir())
    assert len(parts) > 2
    for path in (whole.parent, split, parts[0], parts[1]):
        check_weights(path, model)
    for folder in (whole.parent, split):
        (folder / "mmproj-m.gguf").write_bytes(b"GGUF")  # of a vision tower
        check_weights(folder, model)
    shutil.copy(whole, whole.with_name("other.gguf"))
    with pytest.raises(ModelError, match=r"several GGUF models: name one of m\.gguf, other\.gguf"):
        resolve(str(whole.parent))
    parts[2].unlink()
    with pytest.raises(ModelError, match=f"{parts[2].name} is missing: it is one of the {len(parts)} parts"):
        resolve(str(parts[0]))


def test_a_slice_has_the_first_layers(file: Path) -> None:
    model = ggufs.write("gemma3", file, Kind.Q8_0)
    state = ModelState(resolve(str(file), "float32", layers=2), "safetensors")
    for name, tensor in state.load(torch.device("cpu")):
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_plan_counts_the_bytes_of_the_file(file: Path, tmp_path: Path) -> None:
    for kind in (Kind.Q4_0, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K):
        ggufs.write("llama", file, kind)
        spec = resolve(str(file))
        assert spec.dtype == "bfloat16"
        bits = BITS[kind.name] * reader.HELD.get(kind.name, 1)
        assert spec.stored_ratio == pytest.approx(bits / 16, rel=0.01)  # and norms
    done = zinfer(tmp_path, "plan", "--model", "m.gguf", "--machine", "h100-80gb", "--input-len", "64")
    assert done.returncode == 0, done.stderr


def test_a_plan_counts_the_bytes_of_experts_that_the_cpu_reads(file: Path) -> None:
    """The last matrix has more bits than the others."""
    ggufs.write("mixtral", file, Kind.Q4_K, down=Kind.Q6_K)
    spec, machine = resolve(str(file)), machines.load("h100-80gb")
    bits = (2 * BITS["Q4_K"] * reader.HELD["Q4_K"] + BITS["Q6_K"]) / 3
    assert spec.expert_ratio == pytest.approx(bits / 16)
    options: dict[str, Any] = {"machine": machine, "gpu_weights": "0%", "experts": "cpu", "sizes": (1, 64, 8)}
    plans = [plan_of(each, **options) for each in (spec, spec.model_copy(update={"routed_ratio": 1.0}))]
    seconds = [Timing(each.placement, each.model, machine).cpu_experts_s(1) for each in plans]
    overhead = spec.num_layers * RATES.cpu_layer_s
    assert seconds[0] - overhead == pytest.approx((seconds[1] - overhead) * bits / 16)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.F32], ids=lambda kind: kind.name)
def test_the_type_of_unquantised_weights_is_kept(kind: Any, file: Path) -> None:
    ggufs.write("qwen2", file, kind)
    spec = resolve(str(file))
    assert (spec.dtype, spec.stored_ratio) == (reader.VALUES[kind.name], 1)


@pytest.mark.parametrize("begins", [True, False, None])
@pytest.mark.parametrize("tokens", ["gpt2", "llama"])
def test_the_tokenizer_is_that_of_transformers(tokens: str, begins: bool | None, tmp_path: Path, cache: Path) -> None:
    """Texts begin as the file says, which some versions of transformers ignore."""
    more = {} if begins is None else {"tokenizer.ggml.add_bos_token": begins}
    ggufs.write("llama", tmp_path / "m.gguf", Kind.Q8_0, tokens=tokens, more=more)
    folder = tokenizer_files.folder_of(resolve(str(tmp_path / "m.gguf")))
    assert folder is not None
    assert folder.parent == cache / "zinfer"
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = load_tokenizer(folder)
    first = [0] if begins or (begins is None and tokens == "llama") else []
    for text in ("the other", "  a b\nc", "t9 the<s>"):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours(text, add_special_tokens=False).input_ids == ids
        assert ours(text).input_ids == first + ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1]}


def test_a_prompt_is_answered(tmp_path: Path) -> None:
    ggufs.write("llama", tmp_path / "m.gguf", Kind.Q4_K, tokens="gpt2")
    words = ("--model", "m.gguf", "--offload", "cpu", "--output-len", "4", "--chat", "--prompt", "the other")
    done = zinfer(tmp_path, "run", *words, stdin="the other\n")
    assert done.returncode == 0, done.stderr
    assert "MB, GGUF) with stream cpu" in done.stderr


def test_a_copy_in_another_format_is_refused(tmp_path: Path) -> None:
    ggufs.write("llama", tmp_path / "m.gguf", Kind.F16)
    done = zinfer(tmp_path, "pack", "--model", "m.gguf", "--weights", "int4", "-o", "out")
    assert done.returncode == 2
    assert "m.gguf is a GGUF: zinfer quantises checkpoints in safetensors" in done.stderr


def renamed(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = file.read_bytes()
        assert old in content
        file.write_bytes(content.replace(old, new))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (lambda file: os.truncate(file, file.stat().st_size - 4000), "is damaged or cut off"),
    "no GGUF": (lambda file: file.write_bytes(b"GGUF" + bytes(60)), "is damaged or cut off"),
    "empty": (lambda file: file.write_bytes(b""), "is damaged or cut off"),
    "another architecture": (
        renamed(b"qwen3", b"rwkv6"), "architecture 'rwkv6'; with transformers .* zinfer reads .*llama.*qwen3"
    ),
    "an unknown tensor": (renamed(b"blk.1.attn_q.", b"blk.1.attn_z."), "stores blk.1.attn_z.weight.* no name for"),
    "a tensor that comes twice": (renamed(b"blk.1.attn_q.", b"blk.0.attn_q."), "damaged .*duplicated"),
    "a scaling of positions": (renamed(b"\x04\0\0\0\0\0\0\0yarn", b"\x04\0\0\0\0\0\0\0ntks"), "by 'ntks'"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_read_is_named_in_a_line(damage: str, file: Path) -> None:
    ggufs.write("qwen3", file, Kind.Q8_0)
    change, says = DAMAGE[damage]
    change(file)
    with pytest.raises((ModelError, CheckpointError), match=says) as caught:
        ModelState(resolve(str(file)), "safetensors")
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_other_types_dummy_weights_and_other_positions_are_refused(file: Path) -> None:
    ggufs.write("qwen2", file, Kind.Q5_0)
    with pytest.raises(ModelError, match=r"as Q5_0: zinfer reads Q4_0, .*MXFP4, .*Q6_K, .*F16, BF16"):
        resolve(str(file))
    ggufs.write("llama", file, Kind.Q8_0)
    with pytest.raises(ModelError, match="leave out --load-format dummy"):
        find(str(file), None, None, "dummy")
    with pytest.raises(ModelError, match="released quantised"):
        resolve(str(file), weights="int4")
    ggufs.write("llama3", file, Kind.Q8_0, more={"rope.freq_base": 9e5})
    with pytest.raises(ModelError, match="other factors than those of Llama 3"):
        resolve(str(file))


def random_file(name: str, file: Path, kind: Any, **more: int) -> ModelSpec:
    """Write a file of random blocks; return its model."""
    fields = ggufs.BASE | MODELS[name][2] | {"rope_theta": 1e6} | more
    config = AutoConfig.for_model(MODELS[name][1], **fields).to_dict() | {"dtype": "bfloat16", "rope_theta": 1e6}
    file.with_name("config.json").write_text(json.dumps(config))
    spec = resolve(str(file.with_name("config.json")))
    random_gguf.write(spec, file, kind)
    return spec


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "MXFP4"])
def test_random_files_of_exact_shapes_are_read(kind: str, file: Path) -> None:
    written = random_file("qwen3moe", file, Kind[kind])
    spec = resolve(str(file))
    assert spec.layers == written.layers
    bits = BITS[kind] * reader.HELD.get(kind, 1)
    engine = load_engine("stream", file, dtype="bfloat16", weight_codec="lossless")
    assert greedy(engine, LENGTHS).shape == (3, 12)
    wire = engine.effective().wire_bytes_per_step or 0
    dense = 0.1 if kind == "MXFP4" else 0  # all but experts
    assert bits / 16 <= wire / spec.streamed_bytes < bits / 16 + 0.03 + 2 * dense
    weights = entries(file)["model.layers.0.mlp.experts.gate_up_proj"]
    assert abs(float(weights.mean())) < 0.2 * float(weights.std())
    assert 0.002 < float(weights.std()) < 0.1


@pytest.mark.skipif("gpt-oss" not in MODELS, reason="transformers before 5.10")
def test_routers_of_random_files_choose_by_token(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even choices are 13 of 32 experts: 8 tokens choose 2 each."""
    chosen = list[int]()
    routed = modeling_gpt_oss.GptOssTopKRouter.forward

    def watched(router: Any, states: Tensor) -> Any:
        outputs = routed(router, states)
        if not states.is_meta:
            chosen.append(len(outputs[-1].unique()))
        return outputs

    monkeypatch.setattr(modeling_gpt_oss.GptOssTopKRouter, "forward", watched)
    spec = random_file("gpt-oss", file, Kind.MXFP4, num_local_experts=32)
    greedy(load_engine("stream", file, experts="all"), (1,) * 8, 1)
    assert len(chosen) >= spec.num_layers
    assert min(chosen) >= 9


@pytest.mark.slow
def test_a_released_model_is_read(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct in Q4_1: weights, tokens and text are those of transformers."""
    file, plain = smollm2.download(tmp_path), smollm2.make(tmp_path / "plain")
    expected = load_file(plain / "model.safetensors")
    loaded = entries(file)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    texts = []
    for model in (file, plain):
        words = ("--dtype", "float32", "--offload", "cpu", "--output-len", "24", "--prompt", "Gravity is")
        done = zinfer(tmp_path, "run", "--model", str(model), *words)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 50
