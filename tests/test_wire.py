"""Packed layers: every bit arrives, through the arena and the ring, and the engine gives the same tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.test_parity import BATCHES, greedy, load
from zinfer.engine import EngineError
from zinfer.engine.arena import PAGE, HostArena
from zinfer.engine.base import Engine
from zinfer.engine.stream import codec
from zinfer.engine.stream.wire import CodedRing, pack, unpack


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(0.02).to(dtype)


def layer_tensors(seed: int) -> dict[str, Tensor]:
    """Two matrices that shrink, a bias and an odd one that do not."""
    return {
        "a.weight": normal(256, 256 + seed),
        "a.bias": normal(256),
        "b.weight": normal(128, 512),
        "b.odd": normal(7, 3 + seed, dtype=torch.float32),
    }


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(autouse=True)
def small_tensors_are_coded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MIN_NUMEL", 0)


def test_layers_come_back_bit_for_bit() -> None:
    layers = [layer_tensors(seed) for seed in range(4)]
    arena = HostArena(1 << 22, pin=False, grow=True)
    images = [pack(tensors, arena) for tensors in layers]
    arena.seal()
    stored = sum(tensor.nbytes for tensors in layers for tensor in tensors.values())
    assert arena.size == arena.used == images[-1].end < 0.75 * stored
    assert [image.start for image in images[1:]] == [image.end for image in images[:-1]]
    slot = torch.zeros(max(image.slot_bytes for image in images), dtype=torch.uint8)
    for tensors, image in zip(layers, images, strict=True):
        assert len(image.coded) == 2
        unpack(image, arena.memory[image.start : image.end], slot)
        for name, tensor in tensors.items():
            assert torch.equal(bits(image.blocks[name].view(slot)), bits(tensor)), name
    arena.close()


def test_an_arena_that_grows_keeps_what_it_holds_and_has_an_end() -> None:
    arena = HostArena(10 * PAGE, pin=False, grow=True)
    taken = [arena.take(size) for size in (100, PAGE, 3, 2 * PAGE + 1)]
    for value, part in enumerate(taken, 1):
        part.fill_(value)
    arena.take(PAGE)
    for value, part in enumerate(taken, 1):
        assert part.unique().tolist() == [value]
    with pytest.raises(MemoryError, match="the arena has"):
        arena.take(9 * PAGE)
    arena.close()


class Layer(nn.Module):
    """Holds parameters and tells them, as they are when it is called."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "_") for name in tensors}
        for leaf in self.names.values():
            self.register_parameter(leaf, nn.Parameter(torch.empty(0), requires_grad=False))

    def forward(self) -> dict[str, Tensor]:
        return {name: getattr(self, leaf).data.clone() for name, leaf in self.names.items()}


@pytest.mark.parametrize("depth", [2, 3])
def test_the_ring_shows_each_layer_its_own_weights_step_after_step(depth: int) -> None:
    flat = [{name.replace(".", "_"): t for name, t in layer_tensors(seed).items()} for seed in range(3)]
    arena = HostArena(1 << 22, pin=False, grow=True)
    images = [pack(tensors, arena) for tensors in flat]
    arena.seal()
    ring = CodedRing(arena.memory, images, depth, torch.device("cpu"))
    layers = [Layer(tensors) for tensors in flat]
    for index, layer in enumerate(layers):
        ring.bind(index, layer)
    ring.start()
    for _ in range(3):
        for tensors, layer in zip(flat, layers, strict=True):
            for name, seen in layer().items():
                assert torch.equal(bits(seen), bits(tensors[name]))
    layers[0]()
    with pytest.raises(RuntimeError, match="layer 1 is next"):
        layers[2]()
    ring.rewind()
    assert torch.equal(bits(layers[0]()["a_weight"]), bits(flat[0]["a_weight"]))
    assert ring.bytes_copied > 3 * arena.size
    ring.close()
    arena.close()


def tokens(loaded: Engine) -> list[Tensor]:
    try:
        return [greedy(loaded, lengths) for lengths in BATCHES]
    finally:
        loaded.release()


@pytest.mark.parametrize("architecture", ["bloom", "llama", "mixtral", "opt"])
def test_the_engine_gives_the_same_tokens_from_fewer_bytes(
    architecture: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    directory = checkpoint(architecture, hidden_size=256)
    raw = load("stream", directory, "cpu", tmp_path, "bfloat16")
    coded = load("stream", directory, "cpu", tmp_path, "bfloat16", weight_codec="lossless")
    for ours, theirs in zip(tokens(coded), tokens(raw), strict=True):
        assert torch.equal(ours, theirs)
    told, plain = coded.effective(), raw.effective()
    assert told.settings["weight_codec"] == "lossless"
    assert plain.wire_bytes_per_step == plain.streamed_bytes_per_step
    assert told.streamed_bytes_per_step == sum(
        parameter.nbytes
        for layer in coded._layers
        for parameter in layer.parameters()  # type: ignore[attr-defined]
    )
    assert (told.wire_bytes_per_step or 0) < 0.8 * told.streamed_bytes_per_step
    assert told.host_weight_bytes == told.wire_bytes_per_step
    coded.close()
    raw.close()


def test_weights_that_do_not_shrink_go_as_they_are(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = checkpoint("llama")
    coded = load("stream", directory, "cpu", tmp_path, "float32", weight_codec="lossless")
    plain = load("stream", directory, "cpu", tmp_path, "float32")
    for ours, theirs in zip(tokens(coded), tokens(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert coded.effective().wire_bytes_per_step == plain.effective().wire_bytes_per_step
    coded.close()
    plain.close()


def test_an_unknown_codec_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="weight_codec=zip: choose from none, lossless"):
        load("stream", checkpoint("llama"), "cpu", tmp_path, weight_codec="zip")
