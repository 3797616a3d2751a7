"""Own quantisation: codes and scales equal those of compressed-tensors, and are read as any released checkpoint."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, CompressedTensorsConfig

from tests import Patch, invoke, quantized
from tests.checkpoints import save_checkpoint, save_config
from tests.inline_worker import InlineWorker
from tests.running import error, prefill
from tests.test_architecture import GEMMA, VISION
from tests.test_finite import spoil
from tests.test_parity import MACHINE, load, prompts
from tests.test_quantized import EXPERTS, entries
from zinfer.analysis.study import label
from zinfer.checkpoint.quantization import SCHEMES, Scheme
from zinfer.checkpoint.resolve import from_directory
from zinfer.core.errors import ZinferError
from zinfer.core.model import ModelError
from zinfer.engine.quantization import checkpoint as copies
from zinfer.engine.quantization import loading as quantizers
from zinfer.engine.quantization.loading import quantize
from zinfer.record import study
from zinfer.record.study import Deviation

GPT2: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "num_hidden_layers": 2, "hidden_size": 32}
STRATEGIES = {"int4": "group", "int8": "channel", "fp8": "channel"}
LENGTHS = (9, 9)  # equal: rows with padding are rounded elsewhere
FORMATS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}


def library(weight: Tensor, scheme: Scheme, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return compressed-tensors' stored form of a weight, and the decoded weight."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    given = QuantizationArgs(
        num_bits=4 if scheme == "int4" else 8, type="float" if scheme == "fp8" else "int", symmetric=True,
        strategy=STRATEGIES[scheme], group_size=size if scheme == "int4" else None,
    )  # fmt: skip
    whole = QuantizationScheme(targets=["Linear"], weights=given)
    groups = weight.to(torch.float32).unflatten(-1, (-1, size))
    scales = calculate_qparams(groups.amin(-1), groups.amax(-1), given)[0].to(weight.dtype)
    compressor = BaseCompressor.get_value_from_registry(FORMATS[scheme])
    # In float32, where the division is exact enough; the scales are those that are stored.
    exact = {"weight": weight.to(torch.float32), "weight_scale": scales.to(torch.float32)}
    made = compressor.compress(exact, whole) | {"weight_scale": scales}
    return made, compressor.decompress(dict(made), whole)["weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("scheme", "columns"), [("int4", 256), ("int4", 192), ("int4", 48), ("int8", 100), ("fp8", 100)]
)
def test_parts_are_those_of_compressed_tensors(
    scheme: Scheme, columns: int, dtype: torch.dtype, monkeypatch: Patch
) -> None:
    pytest.importorskip("compressed_tensors")
    monkeypatch.setattr(quantizers, "VALUES_AT_ONCE", 5 * columns)  # the last rows are fewer
    weight = torch.randn(33, columns, generator=torch.Generator().manual_seed(1)).mul_(0.02).to(dtype)
    weight[3, :columns] = 0
    weight[4, 0], weight[5, 1] = 0.5, -0.5  # outliers
    expected, values = library(weight, scheme, quantizers.group_size(columns, scheme))
    actual = quantize(weight, scheme)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        if name == "weight_scale":  # the library's scale of zeros is another type's smallest step
            tensor, expected[name] = (torch.cat([part[:3], part[4:]]) for part in (tensor, expected[name]))
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.view(torch.uint8).equal(expected[name].view(torch.uint8)), name
    half_step = {"int4": 0.5 / 7.5, "int8": 0.5 / 127.5, "fp8": 1 / 16}[scheme]  # over the largest magnitude
    largest, rounded = weight.float().abs().amax(1), torch.finfo(dtype).eps  # scales and values are rounded to the type
    assert bool(((values.float() - weight.float()).abs().amax(1) <= (half_step + rounded) * largest + 1e-6).all())


def test_a_row_that_no_group_divides_stays_in_16_bits() -> None:
    weight = torch.randn(4, 100, dtype=torch.bfloat16)
    assert quantize(weight, "int4")["weight"] is weight
    assert [quantizers.group_size(size, "int4") for size in (4096, 320, 96, 48, 100, 0)] == [128, 64, 32, 16, 0, 0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_that_are_none_and_other_tensors_are_refused(scheme: Scheme) -> None:
    for damage in (float("nan"), float("inf")):
        weight = torch.ones(4, 32)
        weight[2, 5] = damage
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize(weight, scheme)
    for weight in (torch.ones(16), torch.ones(2, 2, 16), torch.ones(2, 16, dtype=torch.int32)):
        with pytest.raises(ValueError, match="no matrix"):
            quantize(weight, scheme)


# Quantised copies of checkpoints


def tiny(directory: Path, architecture: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a checkpoint in 16 bits."""
    save_checkpoint(architecture, directory)
    for file in directory.glob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": str(dtype)[6:]}))
    return directory


pack = partial(invoke, "pack")


def output_of(result: Result) -> str:
    """Return the message of a command that refuses."""
    assert result.exit_code != 0
    assert isinstance(result.exception, ZinferError | SystemExit)
    message = f"{result.output} {result.exception}"
    assert "Traceback" not in message
    return message


def logits(model: Any) -> Tensor:
    token_ids, mask = prompts(LENGTHS)
    with torch.inference_mode():
        output: Tensor = model.eval()(token_ids, attention_mask=mask).logits[:, -1]
    return output


@pytest.mark.parametrize("known", [True, False])
def test_the_stored_share_is_known_whatever_layers_are_called(known: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    source = save_config(tmp_path / "m", "bert", is_decoder=True)  # layers in `encoder.layer`
    assert pack("-m", source, "--weights", "int8", "-o", tmp_path / "copy").exit_code == 0
    if not known:
        monkeypatch.setattr("zinfer.checkpoint.resolve.LAYER_INDEX", re.compile("never"))
    spec = from_directory(tmp_path / "copy")
    assert 0.2 < spec.stored_ratio < 0.7
    assert spec.form_ratio >= 1


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("llama", "int4"),
        ("llama", "fp8"),
        ("mixtral", "int4"),
        *(pytest.param(name, scheme, marks=pytest.mark.slow) for name, scheme in (("llama", "int8"), ("opt", "int4"))),
    ],
)
def test_a_packed_folder_is_read_by_zinfer_and_by_transformers(
    architecture: str, scheme: Scheme, tmp_path: Path, monkeypatch: Patch
) -> None:
    pytest.importorskip("compressed_tensors")
    monkeypatch.setattr(copies, "SHARD_BYTES", 60_000)
    source, folder = tiny(tmp_path / "m", architecture), tmp_path / "copy"
    done = pack("-m", source, "--weights", scheme, "-o", folder)
    assert done.exit_code == 0, done.output
    spec, plain = from_directory(folder), from_directory(source)
    assert spec.stored_ratio < 0.62
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert ("stay as they are" in done.stderr) == (architecture == "mixtral")  # its routers
    dequantised = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **dequantised)
    expected = whole.state_dict()
    for name, tensor in entries(folder).items():
        assert torch.equal(tensor, expected[name]), name
    if architecture != "mixtral":  # its experts are one tensor in transformers, which dequantises them if it is told to
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine = load("stream", folder, "cpu", dtype="bfloat16")
    actual = prefill(engine, *prompts(LENGTHS), reserve=1)
    assert torch.equal(actual, logits(whole))
    before = logits(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16))
    largest = {"int4": 0.6, "int8": 0.05, "fp8": 0.3}[scheme] if architecture == "llama" else 1
    assert 0 < error(actual, before) < largest
    assert (0.35 < spec.fp8_ratio < 0.51) if scheme == "fp8" else (spec.fp8_ratio == 0)
    alike = {"name": "", "stored_ratio": 1, "fp8_ratio": 0, "routed_ratio": None, "directory": None, "config": {}}
    assert spec.model_copy(update=alike) == plain.model_copy(update=alike)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_copy_is_no_checkpoint_and_is_written_anew(tmp_path: Path, monkeypatch: Patch) -> None:
    source, folder = tiny(tmp_path / "m"), tmp_path / "copy"
    monkeypatch.setattr(copies, "SHARD_BYTES", 60_000)
    written = []
    for _ in range(2):
        assert pack("-m", source, "--weights", "int4", "-o", folder).exit_code == 0
        written.append(contents(folder))
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"} < set(written[0])
    assert written[0] == written[1]
    left = list[dict[str, bytes]]()
    calls = iter(range(40))  # 21 for the shapes, then the weights

    def interrupted(*given: Any) -> dict[str, Tensor]:
        if next(calls, None) is None:
            left.append(contents(folder))  # as a kill would leave it
            raise OSError(28, "No space left on device")
        return quantize(*given)

    monkeypatch.setattr(copies, "quantize", interrupted)
    failed = pack("-m", source, "--weights", "int8", "-o", folder)
    assert (failed.exit_code, "No space left" in failed.output) == (5, True)
    assert not contents(folder)
    monkeypatch.undo()
    for name, content in left[0].items():
        (folder / name).write_bytes(content)
    assert any(name.startswith("model-00001") for name in left[0])
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        from_directory(folder)
    assert pack("-m", source, "--weights", "int4", "-o", folder).exit_code == 0
    names = {name for name in contents(folder) if not name.endswith(".part")}  # which the next start removes
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                                     "generation_config.json", "zinfer-pack"}  # fmt: skip
    assert from_directory(folder).stored_ratio < 0.4


def multimodal(folder: Path) -> Path:
    config = AutoConfig.for_model("gemma3", text_config=GEMMA, vision_config=VISION)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def with_nan(folder: Path) -> Path:
    spoil(tiny(folder), float("nan"))
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(save_config, architecture="gpt2", **GPT2), "Conv1D, stored transposed"),
        (partial(save_config, architecture="gpt_oss", **EXPERTS), "stores the experts of a layer as one tensor"),
        (lambda folder: quantized.fp8(save_checkpoint("llama", folder)), "is stored quantised already"),
        (multimodal, "is a multimodal checkpoint"),
        (with_nan, "holds NaN or infinity"),
    ],
)
def test_what_cannot_be_quantised_is_refused_in_a_line(make: Any, says: str, tmp_path: Path) -> None:
    assert says in output_of(pack("-m", make(tmp_path / "m"), "--weights", "int8", "-o", tmp_path / "copy"))
    assert not (tmp_path / "copy").exists() or not contents(tmp_path / "copy")


def test_a_folder_with_other_files_stays_as_it_is(tmp_path: Path, monkeypatch: Patch) -> None:
    source, other = tiny(tmp_path / "m"), tmp_path / "other"
    before = contents(source)
    other.mkdir()
    (other / "thesis.txt").write_text("my own")
    for folder in (source, other):
        assert "holds other files" in output_of(pack("-m", source, "--weights", "int8", "-o", folder))
    assert contents(source) == before
    assert contents(other) == {"thesis.txt": b"my own"}
    for option, says in ((("--layers", 2), "has all layers"), (("--allow-nan",), "no code for NaN")):
        refused = pack("-m", source, "--weights", "int8", *option)
        assert (refused.exit_code, says in refused.output) == (2, True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "free, and" in output_of(pack("-m", source, "--weights", "int8", "-o", tmp_path / "copy"))


def test_accuracy_compares_copies_with_the_model(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.worker.process.Worker", InlineWorker)
    monkeypatch.setattr("zinfer.worker.probe.measure_link", lambda device: 5e9)
    monkeypatch.setattr("zinfer.system.local.this_machine", lambda: MACHINE)
    tiny(Path("m"))
    made = pack("-m", "m", "--weights", "int4")
    folder = Path(made.stdout.strip())
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert pack("-m", "m", "--weights", "fp8", "-o", "mine").exit_code == 0
    Path("text").write_text("One line follows another, and none is like the one before it. " * 4)
    words = "study accuracy -m m --prompt-file text --weights int4 --weights int8 --weights mine --offload cpu"
    done = invoke(*words.split(), "--input-len", 9, "--output-len", 4, "--samples", 2, "-o", "out.jsonl")
    assert done.exit_code == 0, done.output
    result = study.last(Path("out.jsonl"), "accuracy")
    along_text = [deviation for deviation in result.of(Deviation) if deviation.along == "text"]
    errors = {label(result, deviation.case): deviation.error for deviation in along_text}
    copies = ["weights=int4", "weights=int8"]
    assert list(errors) == ["batch 2", *copies, "weights=mine"]
    noise, int4, int8, fp8 = errors.values()
    assert noise < int8 < fp8 < int4 < 1
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    save_checkpoint("opt", Path("other"))
    assert "another model than m" in output_of(invoke("study", "accuracy", "-m", "m", "--weights", "other"))
