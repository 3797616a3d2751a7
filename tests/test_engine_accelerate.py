"""Engine accelerate, beyond the parity that test_parity.py checks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_parity import greedy, load
from zinfer.engine import EngineError


def test_only_decoder_layers_are_offloaded(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    loaded = load("accelerate", checkpoint("bloom"), "cpu", tmp_path)
    greedy(loaded, (3, 2))
    spec, effective = loaded.plan.model, loaded.effective()
    assert effective.host_weight_bytes == effective.streamed_bytes_per_step == spec.streamed_bytes
    assert effective.gpu_weight_bytes == spec.other_bytes
    assert effective.pinned_bytes == 0  # there is no device to pin for
    loaded.close()
    loaded.close()


def test_files_lie_under_the_path_until_close(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    loaded = load("accelerate", checkpoint("llama"), "nvme", tmp_path)
    sizes = [file.stat().st_size for file in tmp_path.rglob("*.dat")]
    assert sum(sizes) == loaded.effective().nvme_weight_bytes == loaded.plan.model.streamed_bytes
    loaded.close()
    assert not list(tmp_path.iterdir())


def test_nvme_wants_a_folder(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--nvme-path"):
        load("accelerate", checkpoint("llama"), "nvme", tmp_path / "nowhere")
