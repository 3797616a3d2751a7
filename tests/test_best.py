"""Command `zinfer best`: names the best configuration, in a table and as JSON."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests import mentions
from tests.results import case, point, sweep
from zinfer.cli import cli
from zinfer.record.store import Store


def best(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["best", *map(str, arguments)])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "h100" / "bloom.jsonl") as store:
        for one in sweep():
            store.append(one)
    with Store.open(tmp_path / "h200" / "opt.jsonl") as store:
        store.append(point(case(4, model="opt-[x]-30b", layers=None, load_format="safetensors"), machine="h200"))
        store.append(point(case(1, "accelerate", model="opt-[x]-30b", layers=None, load_format="safetensors"),
                           status="crashed", machine="h200"))  # fmt: skip
    return tmp_path


def test_the_table_answers_with_a_command(results: Path) -> None:
    done = best(results)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert mentions(lines[0], "bloom-176b", "14 of 70 layers", "512 in", "32 out")
    assert "slice" in lines[1]
    assert "dummy weights" in lines[1]
    command = "zinfer run --model bloom-176b --engine stream --offload none --batch-size 8 --dtype bfloat16"
    assert any(line.startswith(command) and "--layers 14 --prompt" in line for line in lines)
    assert mentions(done.stdout, "Best", "stream none", "batch 8")
    assert sum("zinfer plan --model bloom-176b" in line for line in lines) == 1, "the warning about a slice"
    assert mentions(done.stdout, "deepspeed:", "cpu", "18.7 tok/s", "batch 32")
    for engine in ("Any engine:", "stream:"):
        assert any(line.startswith(engine) and re.search(r" cpu .* 0\.\d\dx", line) for line in lines)
    assert mentions(done.stdout, "opt-[x]-30b", "512 in", "32 out")
    assert mentions(done.stdout, "accelerate cpu", "crashed", "batch 1")
    (row,) = [line.strip("│").split("│") for line in lines if line.startswith("│ deepspeed cpu")]
    assert [cell.strip() for cell in row][-3:] == ["74%", "20.0 GiB", "64"]


def test_json_has_stable_keys(results: Path) -> None:
    first, second = json.loads(best(results, "--json").stdout)
    assert list(first) == [
        *("machine", "model", "layers", "input_len", "output_len", "dtype", "load_format", "total_layers"),
        *("best", "best_by_load", "offload", "edges"),
    ]
    assert (first["layers"], first["total_layers"], first["load_format"]) == (14, 70, "dummy")
    assert list(first["best"]) == [
        *("engine", "offload", "options", "batch_size", "output_tok_s", "output_tok_s_half_width", "decode_tok_s"),
        *("ttft_ms", "tpot_ms", "h2d_bandwidth", "link_share", "gpu_peak_bytes", "host_peak_bytes", "command"),
    ]
    assert first["best"] == first["best_by_load"][0]
    assert first["best"]["h2d_bandwidth"] is None, "unknown is null, never 0"
    assert [entry["batch_size"] for entry in first["best_by_load"]] == [8, 64, 64, 32, 16]
    verdict = first["offload"][0]
    assert (verdict["engine"], verdict["offload"], len(verdict["equal_batch"])) == (None, "cpu", 4)
    (edge,) = [edge for edge in first["edges"] if edge["options"]]
    assert edge == {
        "engine": "stream",
        "offload": "cpu",
        "options": {"weight_codec": "lossless"},
        "largest_ok": 64,
        "smallest_oom": 128,
    }
    assert second["machine"] == "h200"
    assert "--layers" not in second["best"]["command"]


def test_filters_choose_model_and_machine(results: Path) -> None:
    assert [group["machine"] for group in json.loads(best(results, "--machine", "h200", "--json").stdout)] == ["h200"]
    assert len(json.loads(best(results, "--model", "bloom-176b", "--json").stdout)) == 1
    done = best(results, "--model", "bloom-7b1")
    assert done.exit_code == 4
    assert "bloom-176b on h100" in done.stderr


@pytest.mark.parametrize("failed", [False, True])
def test_nothing_usable_is_one_message(tmp_path: Path, failed: bool) -> None:
    if failed:
        with Store.open(tmp_path / "a.jsonl") as store:
            store.append(point(case(1), status="oom_host"))
    done = best(tmp_path)
    assert done.exit_code == 4
    assert done.stderr.count("\n") == 1
    assert ("oom_host" if failed else "zinfer sweep") in done.stderr


def test_no_verb_over_results_needs_torch_or_pyplot(results: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['matplotlib.pyplot'] = None\n"
        "from zinfer.cli import cli\n"
        "for verb in ('plot -o plots --format svg', 'report -o plots/report.md', 'best'):\n"
        "    name, *options = verb.split()\n"
        "    cli.main([name, sys.argv[1], *options], standalone_mode=False)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(results)], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "plots" / "report.md").is_file()
