"""Command `zinfer study codec` on the machine that runs the tests: coded sizes, the lower bound, and the check of every
bit."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import Patch, environment, invoke, mentions
from tests.results import codec_run, plain, sweep
from tools import trained
from zinfer.analysis.study import gain as gain_of
from zinfer.analysis.study import pays, show, wrong
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.resolve import from_directory
from zinfer.engine.stream.weights import codec as coder
from zinfer.generation.tokenizer import load_tokenizer
from zinfer.record import study
from zinfer.record.store import Store
from zinfer.record.study import Coded, Rate, StudyError
from zinfer.worker import codec, probe

MIB = 1 << 20


@pytest.fixture(autouse=True)
def swift(monkeypatch: Patch, tmp_path: Path) -> None:
    """Make the measurement fast with small buffers and few samples. Its results go to a temporary folder."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(codec, "SIZE", {"cpu": 2 * MIB})
    monkeypatch.setattr(probe, "BUDGET_S", 0.01)
    monkeypatch.setattr(probe, "measure_link", lambda device: 5e9)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a checkpoint of one file: a layer with two matrices and a norm, an embedding, and a float32 tensor."""
    shapes, dice = {"up": (1024, 512), "down": (512, 1024), "gate": (512, 512)}, torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=dice) * 0.02 for name, shape in shapes.items()}
    tensors = {f"model.layers.0.{name}.weight": tensor for name, tensor in drawn.items()}
    tensors |= {"model.embed.weight": torch.ones(64, 64), "model.layers.0.norm.weight": torch.ones(1024)}
    tensors = {name: tensor if "gate" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    tensors["model.layers.0.ids"] = torch.ones(4, 4, dtype=torch.int32)
    path = tmp_path / "small-1.5.safetensors"
    save_file(tensors, path, {"source": "made up"})
    return path


coded = partial(invoke, "study", "codec")


def test_drawn_weights_shrink_nearly_to_the_bound() -> None:
    measured = codec.measure()
    (row,) = measured.of(Coded)
    assert (row.name, row.status) == (codec.DRAWN, "ok")
    assert row.raw_bytes == row.total_bytes == 2 * MIB
    assert row.bound < row.ratio < row.bound + 0.015
    assert 0.658 < row.bound < 0.660  # 2.55 bits of exponent
    assert row.encode is not None
    assert row.decode is not None
    assert row.decode.median > 0
    assert measured.link == 5e9
    assert measured.versions["torch"] == torch.__version__
    assert wrong(measured) == ()
    first, second = (codec.draw(MIB, torch.device("cpu")) for _ in range(2))
    assert torch.equal(first, second)
    noise = torch.randint(1 << 15, (MIB,), dtype=torch.int16).view(torch.bfloat16)
    assert codec._measure("noise", "any bits", 2 * MIB, noise, 2 * MIB).status == "no_smaller"


def test_the_bound_is_the_entropy_of_each_block() -> None:
    steady = torch.ones(2 * coder.BLOCK).bfloat16()
    assert codec._bound(steady) == 8 / 16
    fair = torch.tensor([1.0, -4.0]).bfloat16().repeat(coder.BLOCK)
    assert codec._bound(fair) == pytest.approx(9 / 16)
    assert codec._bound(torch.cat([steady[: coder.BLOCK], -steady[: coder.BLOCK] * 8])) == 8 / 16  # a table for each


def test_a_decoder_that_lies_is_caught(monkeypatch: Patch) -> None:
    decode = coder.decode

    def lies(data: torch.Tensor, layout: coder.Layout, out: torch.Tensor) -> None:
        decode(data, layout, out)
        out.view(torch.int16)[-1] ^= 1

    monkeypatch.setattr(coder, "decode", lies)
    result = coded("-o", "codec.jsonl")
    assert result.exit_code == 6
    assert "gaussian: the codec returned other bits" in result.stderr
    measured = study.last(Path("codec.jsonl"), "codec")
    assert wrong(measured) == (codec.DRAWN,)
    assert {(row.status, row.decode) for row in measured.of(Coded)} == {("wrong_bits", None)}
    assert show(measured).cells[0][-1] == "FAILED"


def test_the_matrices_of_layers_are_taken(file: Path) -> None:
    source = codec.find(file)
    names = {f"model.layers.0.{name}.weight" for name in ("up", "down", "gate")}
    assert (source.name, set(source.matrices)) == ("small-1.5", names)
    values, about = codec.read(source, source.bytes)
    stored = load_file(file)
    wanted = torch.cat([stored[name].bfloat16().view(-1) for name in source.matrices])
    assert torch.equal(values.sort().values, wanted.sort().values)
    assert about == "made up; 3 matrices, stored as bf16/f32"
    values, about = codec.read(source, source.bytes // 4)
    assert values.nbytes == source.bytes // 4
    assert about.endswith("the first 25.0% of each")
    first = stored[next(iter(source.matrices))].bfloat16().view(-1)
    assert torch.equal(values[: len(first) // 4], first[: len(first) // 4])


def test_a_folder_is_a_checkpoint(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model-0.5b"
    folder.mkdir()
    file.rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    row = codec.measure([folder]).of(Coded)[-1]
    assert (row.name, row.status) == ("model-0.5b", "ok")
    assert row.description.startswith("llama; made up; 3 matrices, stored as bf16/f32")
    assert row.bound < row.ratio < row.bound + 0.02


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing"], "missing is neither the folder of a checkpoint nor a .safetensors file"),
        (["weights.bin"], "weights.bin is neither"),
        (["empty"], "config.json is missing"),
        (["cut.safetensors"], "cut off"),
        (["tiny.safetensors"], "has 64 weights to code, at least 1048576 are needed"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(words: list[str], message: str, file: Path) -> None:
    Path("weights.bin").write_bytes(b"x")
    Path("empty").mkdir()
    Path("cut.safetensors").write_bytes(file.read_bytes()[:-10])
    save_file({"w": torch.ones(8, 8).bfloat16()}, "tiny.safetensors")
    result = coded(*words)
    assert result.exit_code != 0
    text = result.stderr if isinstance(result.exception, SystemExit) else str(result.exception)
    assert message in text
    assert isinstance(result.exception, SystemExit | StudyError | CheckpointError)
    assert "measuring" not in result.stderr
    assert not list(Path().rglob("codec.json*"))


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from zinfer.cli import main; main()"
    words = [sys.executable, "-c", code, "study", "codec"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False)
    assert (done.returncode, done.stderr) == (5, "Error: this needs torch: pip install 'zinfer[engines]'\n")


@pytest.mark.parametrize(
    ("decode", "gain", "verdict"), [(8e11, 2.0, "yes, 2.00x"), (7.5e10, 1.5, "yes, 1.50x"), (4e10, 0.8, "no, too slow")]
)
def test_it_pays_where_decoding_outruns_the_link(decode: float, gain: float, verdict: str) -> None:
    measured = codec_run("gaussian", decode=Rate(median=decode, spread=0.02, samples=20, of="bytes"))
    (row,) = measured.of(Coded)
    assert row.decode is not None
    assert gain_of(row, measured.link or 0) == pytest.approx(gain)
    assert pays(row, measured.link or 0) == verdict


def test_the_report_shows_the_codec(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h100"
    folder.mkdir(parents=True)
    with Store(folder / "bloom.jsonl") as store:
        for point in sweep():
            store.append(point)

    def text() -> str:
        result = invoke("report", tmp_path / "results", "-o", tmp_path / "r.html")
        assert result.exit_code == 0, result.output
        return plain((tmp_path / "r.html").read_text())

    assert "Lossless coding" not in text()
    study.append(folder / "codec.jsonl", codec_run("gaussian"))
    study.append(folder / "codec.jsonl", codec_run("gaussian", status="wrong_bits", decode=None))
    page = text()
    assert mentions(page, "Lossless coding", "h100")
    assert "FAILED" in page
    (folder / "codec.jsonl").write_text("{")
    assert "codec.jsonl, line 1: not a whole record" in text()


def test_a_model_trained_here_is_weights_to_measure(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(trained, "texts", lambda: (bytes(range(97)) * 40, "héllo".encode(), b"prose"))
    path = tmp_path / "out" / "trained"
    source = trained.train(path, steps=2, batch=2, hidden_size=256, layers=1)
    assert mentions(source, "Llama", "1 million weights", "0.0 million bytes")
    checkpoint = codec.find(path)
    assert len(checkpoint.matrices) == 7
    assert codec.read(checkpoint, checkpoint.bytes)[1] == f"llama; {source}; 7 matrices, stored as bf16"
    spec = from_directory(path)
    assert (spec.head_dim, spec.dtype, spec.max_position) == (64, "bfloat16", trained.LENGTH)
    tokenizer = load_tokenizer(path)
    assert tokenizer((path / "held-out.txt").read_text()).input_ids == list("héllo".encode())
    assert (path / "held-out-prose.txt").read_text() == "prose"


def test_text_that_is_held_out_is_not_trained_on() -> None:
    seen, source, prose = trained.texts()
    assert min(len(source), len(prose)) > 10_000
    assert all(part not in seen for part in prose.split(b"\n\n") if len(part) > 80)
    assert source[:2000] not in seen


@pytest.mark.gpu
def test_the_codec_on_a_gpu(monkeypatch: Patch) -> None:
    monkeypatch.undo()
    measured = codec.measure()
    assert wrong(measured) == ()
    for row in measured.of(Coded):
        assert row.decode is not None
        assert row.decode.samples >= 10
        assert row.decode.median > (measured.link or 0)
