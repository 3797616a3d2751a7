"""Hugging Face hub: downloads from a fake server on the loopback device, and behaviour without a network."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests import PATIENCE_S, mentions
from zinfer.core.errors import ENVIRONMENT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROPE = {"rope_type": "linear", "factor": 2.0}
SHAPE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LLAMA = SHAPE | {"model_type": "llama", "torch_dtype": "float16", "rope_scaling": ROPE}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SURPLUS = {"modeling.py": "code", "consolidated.safetensors": "weights once more", "original/params.json": "{}"}
CONFIGS = {
    "good": LLAMA,
    "pickled": LLAMA,
    "remote-code": LLAMA | {"model_type": "novel", "auto_map": {"AutoConfig": "x.C"}},
    "quantised": LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}},
    "vision": {"model_type": "clip"},
}
REPOSITORIES = {f"owner/{name}": {"config.json": json.dumps(config)} for name, config in CONFIGS.items()}
REPOSITORIES["owner/good"] |= {"tokenizer.json": "{}", "model.safetensors": "weights"} | SURPLUS
REPOSITORIES |= {"owner/empty": {"README.md": ""}, "owner/broken": {"config.json": "{"}}
for name in ("good", "pickled"):
    REPOSITORIES[f"owner/{name}"]["pytorch_model.bin"] = "pickle"


class Hub(BaseHTTPRequestHandler):
    """Part of the hub's interface that a download needs."""

    asked: list[str]

    def do_GET(self, body: bool = True) -> None:
        self.asked.append(self.path)
        parts = self.path.split("?")[0].removeprefix("/api/models").strip("/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        files = REPOSITORIES.get(name)
        if files is None:
            code = "GatedRepo" if name == "owner/gated" else "RepoNotFound"
            return self.answer(403 if code == "GatedRepo" else 404, b"", {"X-Error-Code": code}, body)
        if rest[:1] == ["resolve"]:
            content, kept = files.get("/".join(rest[2:])), {"X-Repo-Commit": COMMIT}
            if content is None:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"} | kept, body)
            return self.answer(200, content.encode(), {"ETag": f'"{abs(hash(content)):032x}"'} | kept, body)
        listing: object = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
        if rest[:1] == ["tree"]:
            listing = [{"type": "file", "path": file, "size": len(text), "oid": COMMIT} for file, text in files.items()]
        return self.answer(200, json.dumps(listing).encode(), {}, body)

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def answer(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content)), "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(home: Path, *calls: str, **env: str) -> list[str]:
    """Call functions of `zinfer.checkpoint.hub` in a fresh process. Returns each result as text. The hub library reads
    its settings once, when it is imported."""
    code = """
import json, sys
from zinfer.checkpoint import hub, resolve
answers = []
for call in sys.argv[1:]:
    try:
        answers.append(str(eval(call, vars(hub) | vars(resolve))))
    except resolve.ModelError as error:
        answers.append(f"ModelError: {error} ({error.exit_code})")
print(json.dumps(answers))
"""
    settings = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings |= {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    run = subprocess.run(
        [sys.executable, "-c", code, *calls], env=settings, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    answers: list[str] = json.loads(run.stdout)
    assert all("\n" not in answer and len(answer) < 400 for answer in answers)
    return answers


CALLS = ("from_hub('owner/good')", "download('owner/good')", "cached('owner/good')")


@pytest.mark.parametrize(
    ("name", "value", "says"), [("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE"), ("HF_ENDPOINT", "http://127.0.0.1:9", "hub")]
)
def test_without_a_copy_the_way_out_is_named(name: str, value: str, says: str, tmp_path: Path) -> None:
    *refused, folder = ask(tmp_path, *CALLS, **{name: value})
    for answer in refused:
        assert mentions(answer, "ModelError", "owner/good", says, "--load-format dummy", "local folder")
        assert answer.endswith(f"({ENVIRONMENT})")
    assert folder == "None"


def test_offline_without_a_copy_it_names_similar_models_of_the_catalogue(tmp_path: Path) -> None:
    (answer,) = ask(tmp_path, "resolve('meta-llama/Llama-3.1-70B-Instruct')", HF_HUB_OFFLINE="1")
    assert mentions(answer, "HF_HUB_OFFLINE", "did you mean 'llama-3.1-70b'")


@pytest.mark.torch
@pytest.mark.slow
def test_a_failed_download_is_one_line(tmp_path: Path, hub: str) -> None:
    wrong = {
        "from_hub('owner/missing')": "no such model, or it is private",
        "from_hub('owner/gated')": "its access is restricted: accept its terms",
        "from_hub('owner/empty')": "no config.json",
        "from_hub('owner/remote-code')": "code of the repository, which zinfer does not run",
        "from_hub('owner/quantised')": "quantised",
        "from_hub('owner/broken')": "cannot be read",
        "from_hub('owner/vision')": "decoder-only language model",
        "download('owner/missing')": "no such model",
        "download('owner/pickled')": "it has no safetensors, and pickled weights are not read",
        "from_hub('owner/bad--name')": "owner/bad--name: ",
        "cached('owner/bad--name')": "None",
    }
    for (call, says), answer in zip(wrong.items(), ask(tmp_path, *wrong, HF_ENDPOINT=hub), strict=True):
        assert says in answer, call
        assert answer.startswith("ModelError: ") or says == "None"


@pytest.mark.torch
def test_a_spec_needs_the_configuration_only(tmp_path: Path, hub: str) -> None:
    fields = "(lambda s: (s.parameters, s.layer_parameters, s.dtype, s.hub_id, s.config['rope_scaling']))"
    (answer,) = ask(tmp_path, f"{fields}(resolve('owner/good'))", HF_ENDPOINT=hub)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64
    total = 2 * layer + 2 * 320 * 64 + 64
    assert answer == str((total, (layer, layer), "float16", "owner/good", ROPE))
    assert all("/resolve/" not in path or path.endswith("/config.json") for path in Hub.asked)


@pytest.mark.torch
def test_a_download_is_complete_and_holds_no_code(tmp_path: Path, hub: str) -> None:
    before, folder, after = ask(tmp_path, CALLS[2], CALLS[1], CALLS[2], HF_ENDPOINT=hub)
    assert before == "None"
    assert folder == after
    assert {path.name for path in Path(folder).iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    offline = ask(tmp_path, CALLS[1], "from_hub('owner/good').parameters", HF_HUB_OFFLINE="1")
    assert offline[0] == folder
    assert offline[1].isdigit()
    (Path(folder) / "model.safetensors").unlink()
    assert ask(tmp_path, CALLS[2], HF_HUB_OFFLINE="1") == ["None"]
