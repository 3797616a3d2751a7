"""Command `zinfer study codec` on the machine that runs the tests: coded sizes, the lower bound, and the check of every
bit."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from tests import mentions
from tests.results import codec_run, sweep
from tools import trained
from zinfer.analysis.study import gain as gain_of
from zinfer.analysis.study import pays, show, wrong
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.resolve import from_directory
from zinfer.cli import cli
from zinfer.engine.stream.weights import codec as coder
from zinfer.generation.tokenizer import load_tokenizer
from zinfer.record import study
from zinfer.record.store import Store
from zinfer.record.study import Coded, Rate, StudyError
from zinfer.worker import codec, probe

MIB = 1 << 20


@pytest.fixture(autouse=True)
def swift(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the measurement fast with small buffers and few samples. Its results go to a temporary folder."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(codec, "SIZE", {"cpu": 2 * MIB})
    monkeypatch.setattr(probe, "BUDGET_S", 0.01)
    monkeypatch.setattr(probe, "measure_link", lambda device: 5e9)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a checkpoint of one file: a layer with two matrices and a norm, an embedding, and a float32 tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed.weight": torch.ones(64, 64).bfloat16(),
        "model.layers.0.up.weight": (torch.randn(1024, 512, generator=generator) * 0.02).bfloat16(),
        "model.layers.0.down.weight": (torch.randn(512, 1024, generator=generator) * 0.02).bfloat16(),
        "model.layers.0.norm.weight": torch.ones(1024).bfloat16(),
        "model.layers.0.gate.weight": torch.randn(512, 512, generator=generator) * 0.02,
        "model.layers.0.ids": torch.ones(4, 4, dtype=torch.int32),
    }
    path = tmp_path / "small-1.5.safetensors"
    save_file(tensors, path, {"source": "made up"})
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["study", "codec", *map(str, arguments)])


def test_drawn_weights_shrink_nearly_to_the_bound() -> None:
    measured = codec.measure()
    rows = measured.of(Coded)
    assert [row.name for row in rows] == list(codec.DRAWN)
    for row in rows:
        assert row.status == "ok"
        assert row.raw_bytes == row.total_bytes == 2 * MIB
        assert row.bound < row.ratio < row.bound + 0.015
        assert row.encode is not None
        assert row.decode is not None
        assert row.decode.median > 0
    gaussian, scaled, laplace, fp8 = (row.bound for row in rows)
    assert 0.818 < fp8 < 0.820
    assert 0.658 < gaussian < 0.660 < scaled < 0.69  # 2.55 bits of exponent
    assert gaussian < laplace < 0.69
    assert measured.link == 5e9
    assert measured.versions["torch"] == torch.__version__
    assert wrong(measured) == ()


def test_drawn_weights_are_the_same_every_time() -> None:
    for name in codec.DRAWN:
        first, second = (codec.draw(name, MIB, torch.device("cpu")) for _ in range(2))
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        assert first.dtype == (torch.float8_e4m3fn if name == codec.FP8 else torch.bfloat16)
        assert first.nbytes == MIB


def test_the_bound_is_the_entropy_of_each_block() -> None:
    steady = torch.ones(2 * coder.BLOCK).bfloat16()
    assert codec._bound(steady) == 8 / 16
    fair = torch.tensor([1.0, -4.0]).bfloat16().repeat(coder.BLOCK)
    assert codec._bound(fair) == pytest.approx(9 / 16)
    assert codec._bound(torch.cat([steady[: coder.BLOCK], -steady[: coder.BLOCK] * 8])) == 8 / 16  # a table for each


def test_a_decoder_that_lies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = coder.decode

    def lies(data: torch.Tensor, layout: coder.Layout, out: torch.Tensor) -> None:
        decode(data, layout, out)
        out.view(torch.int16)[-1] ^= 1

    monkeypatch.setattr(coder, "decode", lies)
    result = invoke("-o", "codec.jsonl")
    assert result.exit_code == 6
    assert "gaussian, row-scaled, laplace, gaussian in fp8: the codec returned other bits" in result.stderr
    measured = study.last(Path("codec.jsonl"), "codec")
    assert wrong(measured) == tuple(codec.DRAWN)
    assert {(row.status, row.decode) for row in measured.of(Coded)} == {("wrong_bits", None)}
    assert show(measured).cells[0][-1] == "FAILED"


def test_the_matrices_of_layers_are_taken(file: Path) -> None:
    source = codec.find(file)
    assert (source.name, set(source.matrices)) == ("small-1.5", {f"model.layers.0.{n}.weight" for n in ("up", "down")})
    values, about = codec.read(source, source.bytes)
    stored = load_file(file)
    assert torch.equal(values.sort().values, torch.cat([stored[n].view(-1) for n in source.matrices]).sort().values)
    assert about == "made up; 2 matrices, stored as bf16"
    with_casts = codec.find(file, cast=True)
    assert len(with_casts.matrices) == 3
    assert codec.read(with_casts, with_casts.bytes)[1].endswith("3 matrices, stored as bf16/f32")


def test_a_part_of_each_matrix_of_a_large_checkpoint_is_taken(file: Path) -> None:
    source = codec.find(file)
    values, about = codec.read(source, source.bytes // 4)
    assert values.nbytes == source.bytes // 4
    assert about.endswith("the first 25.0% of each")
    stored = load_file(file)
    first = next(iter(source.matrices))
    assert torch.equal(values[: stored[first].numel() // 4], stored[first].view(-1)[: stored[first].numel() // 4])


def test_codes_in_fp8_are_measured_with_their_expansion(tmp_path: Path) -> None:
    """NaN in a checkpoint comes back as NaN; weights that do not shrink are a finding here, too."""
    codes = codec.draw(codec.FP8, 2 * MIB, torch.device("cpu")).view(torch.uint8)
    codes[:512] = torch.arange(512).to(torch.uint8)
    path = tmp_path / "quantised.safetensors"
    part = codes.view(torch.float8_e4m3fn)[: 2 * MIB - 2048].view(-1, 1024)
    others = {"model.layers.0.norm.weight": torch.ones(9), "model.layers.0.down.weight_scale": part[:128].clone()}
    save_file({"model.layers.0.up.weight": part} | others, path)
    source = codec.find(path)
    assert (source.fp8, source.bytes) == (True, 2 * MIB - 2048)
    values, about = codec.read(source, source.bytes)
    row = codec._measure(source.name, about, source.bytes, values, source.bytes)
    assert (row.status, about) == ("ok", "1 matrices, stored as f8_e4m3")
    assert row.bound < row.ratio < 0.835
    noise = torch.randint(256, (MIB,), dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codec._measure("noise", "any codes", MIB, noise, MIB).status == "no_smaller"


def test_a_folder_is_a_checkpoint(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model-0.5b"
    folder.mkdir()
    file.rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    row = codec.measure([folder]).of(Coded)[-1]
    assert (row.name, row.status) == ("model-0.5b", "ok")
    assert row.told == "llama; made up; 2 matrices, stored as bf16"
    assert row.bound < row.ratio < row.bound + 0.02


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing"], "missing is neither the folder of a checkpoint nor a .safetensors file"),
        (["weights.bin"], "weights.bin is neither"),
        (["empty"], "config.json is missing"),
        (["cut.safetensors"], "cut off"),
        (["tiny.safetensors"], "has 64 bf16 weights to code, at least 1048576 are needed"),
        (["wide.safetensors"], "--dtype bf16 casts its other floats to bf16"),
        (["--dtype", "fp16"], "only bfloat16 is coded"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(words: list[str], message: str, file: Path) -> None:
    Path("weights.bin").write_bytes(b"x")
    Path("empty").mkdir()
    Path("cut.safetensors").write_bytes(file.read_bytes()[:-10])
    save_file({"w": torch.ones(8, 8).bfloat16()}, "tiny.safetensors")
    save_file({"w": torch.ones(1024, 1024)}, "wide.safetensors")
    result = invoke(*words)
    assert result.exit_code != 0
    text = result.stderr if isinstance(result.exception, SystemExit) else str(result.exception)
    assert message in text
    assert isinstance(result.exception, SystemExit | StudyError | CheckpointError)
    assert "measuring" not in result.stderr
    assert not list(Path().rglob("codec.json*"))


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(StudyError, match=re.escape("pip install 'zinfer[engines]'")):
        codec.measure()


def test_the_table_has_a_line_for_each(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = invoke(file)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines()]
    lines = [line for line in lines if line]
    assert [line[0] for line in lines[:5]] == [*codec.DRAWN, "small-1.5"]
    assert lines[0][2:4] == [f"{study.last(Path(), 'codec').of(Coded)[0].ratio:.1%}", "65.9%"]
    assert "measuring laplace" in result.stderr


@pytest.mark.parametrize(
    ("decode", "gain", "verdict"), [(8e11, 2.0, "yes, 2.00x"), (7.5e10, 1.5, "yes, 1.50x"), (4e10, 0.8, "no, too slow")]
)
def test_it_pays_where_decoding_outruns_the_link(decode: float, gain: float, verdict: str) -> None:
    measured = codec_run("gaussian", decode=Rate(median=decode, spread=0.02, samples=20, of="bytes"))
    (row,) = measured.of(Coded)
    assert row.decode is not None
    assert gain_of(row, measured.link or 0) == pytest.approx(gain)
    assert pays(row, measured.link or 0) == verdict


def test_cells_are_text_with_units() -> None:
    assert show(codec_run("gaussian")).cells == [
        ("gaussian", "1.1 GB", "50.0%", "45.0%", "800", "800 ± 1.0%", "yes, 2.00x")
    ]


def test_the_report_shows_measured_and_published_apart(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h100"
    folder.mkdir(parents=True)
    with Store.open(folder / "bloom.jsonl") as store:
        for point in sweep():
            store.append(point)

    def text() -> str:
        result = CliRunner().invoke(cli, ["report", str(tmp_path / "results"), "-o", str(tmp_path / "r.md")])
        assert result.exit_code == 0, result.output
        return (tmp_path / "r.md").read_text()

    assert "Lossless coding" not in text()
    study.append(folder / "codec.jsonl", codec_run("gaussian"))
    study.append(folder / "codec.jsonl", codec_run("gaussian", status="wrong_bits", decode=None))
    page = text()
    assert mentions(page, "Lossless coding", "h100")
    assert "FAILED" in page
    assert page.index("FAILED") < page.index("not measured here") < page.index("DFloat11")
    (folder / "codec.jsonl").write_text("{")
    assert "codec.jsonl, line 1: not a whole record" in text()


def test_a_model_trained_here_is_weights_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_codec_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    measured = codec.measure()
    assert wrong(measured) == ()
    for row in measured.of(Coded):
        assert row.decode is not None
        assert row.decode.samples >= 10
        assert row.decode.median > (measured.link or 0)
