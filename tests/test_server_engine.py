"""Servers as engines: presets, the count of tokens, real servers under load, and their ends."""

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import PATIENCE_S, Checkpoints, Patch, wait
from tests.command import python, started, zinfer
from tests.inline import SPEC
from zinfer.core.case import Case, Workload
from zinfer.core.engine import OptionError
from zinfer.engine import EngineError, kind
from zinfer.engine.server import preset
from zinfer.engine.server.completions import token_times
from zinfer.engine.server.preset import Preset
from zinfer.engine.server.process import Address, free_port
from zinfer.job.recipe import engine_recipe
from zinfer.record.store import read
from zinfer.system.documents import DocumentError

ROOT = Path(__file__).parents[1]
SHIPPED = ("llama-server", "sglang", "trtllm-serve", "vllm", "zinfer-serve")


def case(engine: str = "vllm", **fields: Any) -> Case:
    workload = Workload(batch_size=8, input_len=24, output_len=8)
    asked: dict[str, Any] = {"model": "m", "engine": engine, "offload": "none", "workload": workload}
    return Case(**(asked | fields))


# Presets


def test_the_presets_are_engines() -> None:
    assert sorted(preset.presets()) == sorted(SHIPPED)
    for name in SHIPPED:
        recipe, server = engine_recipe(name), preset.read(name)
        assert (recipe.engine, recipe.options) == (name, {})
        assert kind(name).offloads == set(server.offload if server else ())
    with pytest.raises(EngineError, match=r"no engine 'vlm'; did you mean 'vllm'"):
        kind("vlm")


@pytest.mark.parametrize(("engine", "fields", "words"), [
    ("vllm", {"offload": "cpu", "gpu_weights": "25%"}, ["--cpu-offload-gb", "HOST"]),
    ("vllm", {"options": (("args", "--enforce-eager --seed '1'"),)}, ["--enforce-eager", "--seed", "1"]),
    ("llama-server", {"offload": "cpu", "gpu_weights": "50%"}, ["--n-gpu-layers", "LAYERS"]),
    ("llama-server", {"options": (("file", "a file.gguf"),)}, ["--model", "a file.gguf"]),
    ("llama-server", {}, ["--ctx-size", "256"]),
    ("zinfer-serve", {"load_format": "dummy"}, ["--load-format", "dummy"]),
])  # fmt: skip
def test_a_command_line_says_where_weights_are(engine: str, fields: dict[str, Any], words: list[str]) -> None:
    asked, spec = case(engine, **fields), SPEC.model_copy(update={"directory": "/ckpt"})
    server: Any = preset.read(engine)
    line = server.command_line(asked, spec, asked.workload, 4321)
    streamed, layers = spec.streamed_bytes * spec.stored_ratio, spec.num_layers
    values = {"HOST": f"{streamed * 0.75 / 2**30:.2f}", "LAYERS": str(layers // 2)}
    wanted = [values.get(word, word) for word in words]
    starts = [number for number, word in enumerate(line) if word == wanted[0]]
    assert wanted in [line[start : start + len(wanted)] for start in starts]
    assert "4321" in line
    assert not [word for word in line if "{" in word]


def test_a_preset_refuses_what_it_cannot_do() -> None:
    server = Preset(description="", command="x {port}", offload={"none": "", "cpu": "--slow"})
    assert server.why_not(case()) is None
    assert "no placeholder" in str(server.why_not(case(offload="cpu", gpu_weights="25%")))
    assert "whole models" in str(server.why_not(case(layers=2)))
    vllm: Any = preset.read("vllm")
    with pytest.raises(OptionError, match=r"a checkpoint on disk: give --model FOLDER, or -O file=FILE"):
        vllm.command_line(case(), SPEC, case().workload, 1)
    with pytest.raises(OptionError, match=r"args=--x '.*No closing quotation"):
        vllm.command_line(case(options=(("args", "--x '"), ("file", "f"))), SPEC, case().workload, 1)


@pytest.mark.parametrize(("text", "message"), [
    ('command = "x {ports}"\ndescription = ""\noffload.none = ""', "no placeholder {ports}; there are model, port"),
    ("command = \"x 'y\"\ndescription = \"\"\noffload.none = \"\"", "No closing quotation"),
    ('command = "x"\ndescription = ""\noffload.gpu = ""', "offload.gpu"),
    ('command = "x"\ndescription = ""', "offload: Field required"),
])  # fmt: skip
def test_a_faulty_preset_is_named(text: str, message: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("engines").mkdir()
    Path("engines/mine.toml").write_text(text)
    with pytest.raises(DocumentError) as refusal:
        preset.read("mine")
    assert message in str(refusal.value)
    assert "mine.toml" in str(refusal.value)


def test_an_address_is_a_host_and_a_port() -> None:
    assert Address.of("http://[::1]:80/") == ("::1", 80)
    assert Address.of("gpu-box:8000") == ("gpu-box", 8000)
    for wrong in ("https://a:1", "http://a:1/v1", "http://:x", ""):
        with pytest.raises(EngineError, match="write http://HOST:PORT"):
            Address.of(wrong)


def test_a_port_is_given_to_nobody_else() -> None:
    ports = [free_port() for _ in range(200)]
    assert len({port.getsockname() for port in ports}) == 200
    for port in ports:
        port.close()


# Tokens


def times(bodies: list[dict[str, Any]], tokens: int) -> list[float]:
    """When tokens came if an event comes each second."""
    lines = [*(json.dumps(body).encode() for body in bodies), b"[DONE]"]
    return token_times([(float(number), line) for number, line in enumerate(lines, 1)], 5, tokens)


def text(text: str = "a", ids: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"text": text} | ({} if ids is None else {"token_ids": ids})]} | fields


def usage(tokens: int, prompt: int = 5, **fields: Any) -> dict[str, Any]:
    return {"usage": {"completion_tokens": tokens, "prompt_tokens": prompt, **fields}}


@pytest.mark.parametrize("bodies", [
    [text(**usage(1)), text("", **usage(1)), text(**usage(3))],
    [text(ids=[4]), text("", []), text(ids=[5, 6])],
    [text(timings={"predicted_n": 1}), {"choices": []}, text(timings={"predicted_n": 3})],
])  # fmt: skip
def test_tokens_are_counted_by_what_the_server_says(bodies: list[dict[str, Any]]) -> None:
    assert times(bodies, 3) == [1.0, 3.0, 3.0]


@pytest.mark.parametrize(("bodies", "message"), [
    ([text(), text(), {"choices": [], **usage(2)}], None),  # as many events as tokens
    ([text(), {"choices": [], **usage(2)}], "2 tokens in events of 1"),
    ([text(), text()], "neither ids nor numbers"),
    ([text(**usage(1))], "answered with 1 tokens where 2 were asked for"),
    ([text(**usage(3))], "answered with 3 tokens where 2"),
    ([text(**usage(2, prompt=6))], "a prompt of 6 tokens where 5 were sent"),
    ([text(**usage(2, prompt_tokens_details={"cached_tokens": 4}))], "4 tokens of a prompt from its cache"),
    ([text(**usage(1)), {"error": {"message": "no memory"}}], "no memory"),
])  # fmt: skip
def test_other_work_than_asked_for_is_no_measurement(bodies: list[dict[str, Any]], message: str | None) -> None:
    if message is None:
        assert times(bodies, 2) == [1.0, 2.0]
    else:
        with pytest.raises(EngineError, match=message):
            times(bodies, 2)


# Real servers


def small(folder: Path, fault: str = "", style: str = "", name: str = "small") -> None:
    """Write a preset of `tests/small_server.py`."""
    (folder / "engines").mkdir(exist_ok=True)
    command = f"{{python}} {ROOT / 'tests' / 'small_server.py'} {{port}} '{fault}' '{style}' {{offload}}"
    (folder / "engines" / f"{name}.toml").write_text(
        f'description = "small"\ncommand = "{command}"\nversion = "echo small 1.0"\noffload.none = ""\n'
    )


def sweep(folder: Path, checkpoint: Path, words: str) -> tuple[Any, subprocess.CompletedProcess[str]]:
    ended = zinfer(folder, "sweep", "-m", str(checkpoint), "-o", "out.jsonl", "--offload", "none", *words.split())
    assert (folder / "out.jsonl").exists(), ended.stderr
    return read(folder / "out.jsonl"), ended


@pytest.mark.torch
@pytest.mark.parametrize("style", ["usage", "ids", "timings", "events"])
def test_a_server_is_measured(style: str, folder: Path, checkpoint: Checkpoints) -> None:
    small(folder, style=style)
    words = "--engine small --batch-size 1,3 --input-len 6 --output-len 5 --repeats 2"
    records, ended = sweep(folder, checkpoint("llama"), words)
    assert ended.returncode == 0, ended.stderr
    for point, batch in zip(records.points, (1, 3), strict=True):
        assert (point.status, point.case.workload.batch_size, len(point.step_ms)) == ("ok", batch, 2)
        assert all(len(steps) == 4 for steps in point.step_ms)
        assert min(point.e2e_ms) >= 5 * 2, "each token takes 2 ms"
        assert (point.effective, point.predicted) == (None, {})
        assert re.search(r"small_server\.py.*# small 1\.0$", point.command)
        assert point.host_peak_bytes > 1 << 20
    assert "small none" in zinfer(folder, "best", "out.jsonl").stdout


@pytest.mark.torch
def test_a_server_gets_the_loads_that_other_engines_get(folder: Path, checkpoint: Checkpoints) -> None:
    small(folder)
    words = "--engine small --request-lengths lognormal:6,5 --num-requests 12 --in-flight 3 --request-rate 200,inf"
    records, ended = sweep(folder, checkpoint("llama"), words)
    assert ended.returncode == 0, ended.stderr
    assert [point.requests.loop for point in records.requests] == ["3 in flight", "200 a second", "all at once"]
    for point in records.requests:
        assert (point.status, len(point.samples)) == ("ok", 12)
        assert point.output_tokens == sum(sample.output_len for sample in point.samples)
        assert min(point.of("ttft_ms")) > 1
    words = " ".join(["-o auto.jsonl", *words.split()[:6], "--in-flight auto"])
    _, refused = sweep(folder, checkpoint("llama"), words)
    assert refused.returncode == 4
    assert "in_flight auto is for zinfer's engines" in (folder / "auto.jsonl").read_text()


@pytest.mark.torch
@pytest.mark.parametrize(("fault", "style", "status", "message"), [
    ("dies", "", "crashed", "ended with exit code 3; its log ends: the last words"),
    ("short", "", "unsupported", "the server answered with 4 tokens where 5 were asked for"),
    ("refuses", "", "unsupported", "refused a request with status 429: {\"error\": \"too many\"}"),
    ("", "silent", "unsupported", "tokens in events of"),
    ("never", "", "unsupported", "the server was not ready after 1 s (-O ready_s=..)"),
])  # fmt: skip
def test_a_failure_is_that_point_alone(
    fault: str, style: str, status: str, message: str, folder: Path, checkpoint: Checkpoints
) -> None:
    small(folder, fault, style)
    small(folder, name="other")
    words = "--engine small,other --batch-size 1 --input-len 6 --output-len 5 --repeats 1"
    if fault == "never":
        words = words.replace(",other", "")
    records, ended = sweep(folder, checkpoint("llama"), f"{words} -O ready_s={1 if fault == 'never' else 60}")
    failed, *others = records.points
    assert message in failed.error
    assert [failed.status, *(point.status for point in others)] == [status] + ["ok"] * (fault != "never")
    assert ended.returncode == (4 if fault == "never" else 3)
    wait(lambda: not small_processes(folder))


def small_processes(folder: Path) -> list[psutil.Process]:
    seen = []
    for process in psutil.process_iter(["cmdline", "status"]):
        with suppress(psutil.Error):
            words = process.info["cmdline"] or []
            ours = any("small_server.py" in word for word in words) or words == ["sleep", "600"]
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                seen.append(process)
    return seen


@pytest.mark.torch
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_ends_leaves_no_server(number: int, folder: Path, checkpoint: Checkpoints) -> None:
    small(folder, fault="slow")
    words = ["sweep", "-m", str(checkpoint("llama")), "--engine", "small", "--offload", "none", "--output-len", "40"]
    process = started(folder, *words, stdout=None, stderr=None)
    try:  # the keeper, the server, what it started
        wait(lambda: len(small_processes(folder)) == 3 or process.poll() is not None)
        assert len(small_processes(folder)) == 3
        process.send_signal(number)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
    wait(lambda: not small_processes(folder))


@pytest.mark.torch
def test_a_server_that_runs_already_is_measured_and_left_alone(folder: Path, checkpoint: Checkpoints) -> None:
    port = free_port()
    address = f"127.0.0.1:{port.getsockname()[1]}"
    process = python(
        str(ROOT / "tests" / "small_server.py"), address.partition(":")[2], cwd=folder, start_new_session=True
    )
    try:
        words = f"--engine vllm --batch-size 2 --input-len 6 --output-len 5 -O url=http://{address}"
        records, ended = sweep(folder, checkpoint("llama"), words)
        assert ended.returncode == 0, ended.stderr
        (point,) = records.points
        assert point.command == f"http://{address}"
        assert (point.host_peak_bytes, point.gpu_peak_bytes) == (None, None), "nothing of it was seen"
        assert process.poll() is None
    finally:
        for left in small_processes(folder):
            left.kill()
        process.wait()
        port.close()


@pytest.mark.torch
def test_zinfer_serve_is_an_engine_beside_stream(folder: Path, checkpoint: Checkpoints) -> None:
    without_weights = folder / "without-weights"
    shutil.copytree(checkpoint("llama"), without_weights, ignore=shutil.ignore_patterns("*.safetensors*"))
    words = "--engine stream,zinfer-serve --load-format dummy --batch-size 1,2 --input-len 8 --output-len 4 --repeats 1"
    records, ended = sweep(folder, without_weights, words)
    assert ended.returncode == 0, ended.stderr
    engines = ("stream", "stream", "zinfer-serve", "zinfer-serve")
    assert [(point.case.engine, point.status) for point in records.points] == [(name, "ok") for name in engines]
    assert "zinfer-serve none" in zinfer(folder, "plot", "out.jsonl", "-o", "plots").stdout + ended.stderr


@pytest.mark.parametrize("verb", ["run", "serve", "batch", "plan"])
def test_other_verbs_say_that_a_server_is_measured(verb: str, folder: Path, checkpoint: Checkpoints) -> None:
    more = {"run": ["--prompt", "a"], "batch": ["in.jsonl", "-o", "out.jsonl"]}.get(verb, [])
    (folder / "in.jsonl").write_text("{}\n")
    ended = zinfer(folder, verb, "-m", str(checkpoint("llama")), "--engine", "vllm", *more)
    assert ended.returncode == 2
    assert "`zinfer sweep`" in ended.stderr
    assert os.environ.get("ZINFER_SERVER_KEY") is None


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "type_"), [("gpt_oss", "MXFP4"), ("mixtral", "Q4_0"), ("qwen3_moe", "Q8_0")])
def test_llama_server_runs_random_files_of_exact_shapes(model_type: str, type_: str, folder: Path) -> None:
    pytest.importorskip("gguf", reason="pip install gguf")
    if shutil.which("llama-server") is None:
        pytest.skip("no llama-server: engines/README.md says how it is built")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 64}
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": 2048}
    sizes |= {"sliding_window": 128} if model_type == "gpt_oss" else {}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": model_type, **heads, **experts, **sizes}))
    assert python("-m", "tools.random_gguf", "model", "model.gguf", "--type", type_, cwd=folder).wait() == 0
    words = "--engine llama-server --load-format dummy --batch-size 1,3 --input-len 20 --output-len 8 --repeats 1"
    records, ended = sweep(folder, Path("model"), f"{words} -O file=model.gguf")
    assert ended.returncode == 0, ended.stderr
    assert [point.status for point in records.points] == ["ok", "ok"]
    assert "version" in records.points[0].command
