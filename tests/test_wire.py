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
from zinfer.worker import not_as_asked


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


@pytest.mark.parametrize("weight_codec", ["none", "lossless"])
@pytest.mark.parametrize(("share", "resident"), [("0%", 0), ("34%", 1), ("67%", 2), ("100%", 3), ("auto", 3)])
def test_layers_that_stay_are_not_streamed_and_give_the_same_tokens(
    weight_codec: str, share: str, resident: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    directory = checkpoint("llama", hidden_size=256)
    plain = load("stream", directory, "cpu", tmp_path, "bfloat16", weight_codec=weight_codec)
    case = plain.plan.case.model_copy(update={"gpu_weights": share})
    loaded = type(plain)(plain.plan.model_copy(update={"case": case}))
    for ours, theirs in zip(tokens(loaded), tokens(plain), strict=True):
        assert torch.equal(ours, theirs)
    told, full = loaded.effective(), plain.effective()
    assert told.settings["resident_layers"] == resident
    assert told.streamed_bytes_per_step == full.streamed_bytes_per_step * (3 - resident) // 3
    assert told.wire_bytes_per_step == pytest.approx((full.wire_bytes_per_step or 0) * (3 - resident) / 3, rel=0.01)
    kept = told.gpu_weight_bytes - full.gpu_weight_bytes
    assert kept == pytest.approx(full.host_weight_bytes * resident / 3, rel=0.01)
    assert not_as_asked(case, told) is None
    loaded.close()
    plain.close()


def test_what_stays_changes_with_the_batch(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    engine = load("stream", checkpoint("llama", hidden_size=256), "cpu", tmp_path)
    case = engine.plan.case.model_copy(update={"gpu_weights": "auto"})
    spec = engine.plan.model
    for machine_bytes, most in ((3 << 30, 3), (2 << 30, 0)):
        machine = engine.plan.machine.model_copy(update={"host_bytes": machine_bytes})
        tight = type(engine)(engine.plan.model_copy(update={"case": case, "machine": machine}))
        few, many = (len(tight._residents(size, 64, 8)) for size in (1, 1 << 14))
        assert few == most
        assert many == 0
        tight.close()
    assert spec.num_layers == 3
    engine.close()


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
