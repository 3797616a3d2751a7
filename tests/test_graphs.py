"""Recorded decode steps: passes of static shape give the tokens of passes that are not recorded, and what cannot be
recorded runs as before. `Rerun` takes the place of CUDA graphs; `test_gpu` records them."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests import Checkpoints, Patch, passes, test_continuous, test_drafts, test_ragged
from tests import test_cache_kinds as kinds
from tests.test_parity import BATCHES, OUTPUT_LEN, check, check_tokens, greedy, load, prompts, reference
from tests.test_passes import close
from zinfer.core.case import Offload
from zinfer.core.model import Dtype
from zinfer.engine.base import Engine, Work
from zinfer.engine.stream import attention, graphs
from zinfer.engine.stream.graphs import TUNED, Run, end_of, recorder_of
from zinfer.engine.stream.layer_graphs import BY_LAYER
from zinfer.plan.planner import make_plan

kind = kinds.kind  # the fixture


class Rerun:
    """Recorder that runs functions again. It raises `fails` while it records, and adds `off` to the logits."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.kept = Counter[int]()  # replays by the number of tokens whose logits they give
        self.fails: Exception | None = None
        self.off = 0.0

    def record(self, run: Run) -> Run:
        run()
        if self.fails is not None:
            raise self.fails
        self.recorded += 1

        def replay() -> Any:
            self.replayed += 1
            result: Any = run()
            if isinstance(result, tuple):  # of a layer
                return (result[0] + self.off, *result[1:])
            self.kept[result.shape[1]] += 1
            return result + self.off

        return replay


def tune(patch: Patch, **values: Any) -> None:
    """Change tuned numbers of graphs."""
    patch.setattr(graphs, "TUNED", replace(graphs.TUNED, **values))


@pytest.fixture
def recorder(monkeypatch: Patch) -> Rerun:
    made = Rerun()
    monkeypatch.setattr(graphs, "recorder_of", lambda _device: made)
    tune(monkeypatch, bucket=4)
    return made


def status(engine: Engine) -> Any:
    return engine.effective().settings["cuda_graphs"]


@pytest.mark.parametrize("architecture", ["bloom", "opt", "llama", "mixtral", "falcon-old"])
def test_recorded_steps_give_the_tokens_of_transformers(
    architecture: str, checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun
) -> None:
    directory = checkpoint(architecture)
    engine = load("stream", directory, "none", tmp_path)
    token_ids, mask = prompts((9, 5, 7))
    batch, _ = passes.prefill(engine, token_ids, mask, 14)
    warms = [engine.warming]
    for _ in range(4):
        passes.decode(engine, batch, token_ids[:, -1])
        warms.append(engine.warming)
    assert warms == [False, True, True, False, False], "one step waits, the next ones are compared"
    engine.clear()
    recorder.recorded = recorder.replayed = 0
    check(engine, directory, "none")
    assert status(engine) == "on"
    assert recorder.recorded == 3 + 3, "one for each 4 positions"
    assert recorder.replayed == 2 * (OUTPUT_LEN - 1) - 2 - 4, "all steps but those that wait, more each time"


@pytest.mark.parametrize(
    ("name", "by_layer"), [("bloom", True), ("opt", True), ("llama", True), ("gpt_neox", True), ("falcon-old", False)]
)
def test_layers_whose_weights_cross_the_link_are_recorded_one_by_one(
    name: str, by_layer: bool, checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun
) -> None:
    engine: Any = load("stream", checkpoint(name), "cpu", tmp_path)
    check(engine, checkpoint(name), "cpu")
    assert status(engine) == (BY_LAYER if by_layer else "weights cross the link")
    test_ragged.check(engine, by_layer)
    steps = 10 - 3  # one waits, two are computed both ways
    assert (recorder.replayed > steps * len(engine._layers)) is by_layer


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_layers_that_all_stay_are_recorded_with_their_unpacking(
    codec: str, checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun
) -> None:
    directory = checkpoint("llama")
    dtype: Dtype = "bfloat16" if codec == "lossless" else "float32"
    runs = []
    for option in ("off", "auto"):
        engine = load("stream", directory, "cpu", tmp_path, dtype=dtype, weight_codec=codec, cuda_graphs=option)
        plan = engine.plan
        tokens = greedy(engine, BATCHES[0])
        assert status(engine) == ("off" if option == "off" else BY_LAYER)
        engine.plan = make_plan(plan.case.model_copy(update={"gpu_weights": "100%"}), plan.model, plan.machine)
        for _ in range(2):
            engine.clear()
            assert torch.equal(greedy(engine, BATCHES[0]), tokens)
        runs.append(tokens)
        assert status(engine) == ("off" if option == "off" else "on")
        replayed = recorder.replayed
        assert engine.timeline([Work(engine.batches[0], tokens[:, -1:])]), "a step that is traced is not replayed"
        assert recorder.replayed == replayed
        engine.plan = plan
        engine.clear()
        assert torch.equal(greedy(engine, BATCHES[0]), tokens), "layers that stream again are not those of the graphs"
    assert torch.equal(*runs)
    assert recorder.recorded


@pytest.mark.parametrize(("architecture", "joins"), [("llama", True), ("bloom", True), ("falcon", False)])
def test_several_micro_batches_are_recorded(
    architecture: str, joins: bool, checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun
) -> None:
    """Micro-batches that share a pass share a graph."""
    engine = load("stream", checkpoint(architecture), "none", tmp_path)
    test_ragged.check(engine, joins)
    assert status(engine) == "on"
    assert recorder.replayed > 10 * len(test_ragged.LENGTHS)


def test_sequences_that_come_and_go_get_the_tokens_of_each_alone(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch, recorder: Rerun
) -> None:
    """Rows retire and move; the memory of their graphs goes with them."""
    test_continuous.small(monkeypatch)
    engine: Any = load("stream", checkpoint("llama"), "none", tmp_path)
    finished, limits, _ = test_continuous.come_and_go(engine)
    assert recorder.recorded
    test_continuous.check(engine, finished, limits)
    engine.clear()
    assert not any((engine._graphs._memories, engine._graphs._graph_sets, engine._graphs._spare))


@pytest.mark.parametrize(("name", "by_name"), [("mistral", True), ("gemma2", False), ("gpt_oss", True)])
def test_sliding_windows_are_recorded(
    name: str, by_name: bool, kind: kinds.Kinds, tmp_path: Path, recorder: Rerun, monkeypatch: Patch
) -> None:
    """In all layers, or in every other one, with masks. The window moves to the front before one of four steps."""
    monkeypatch.setattr("zinfer.engine.cache.MIN_SPARE", 4)
    engine: Any = load("stream", kind(name), "none", tmp_path, tokens=max(kinds.LENGTHS))
    expected = kinds.expected(kind(name))
    for _ in range(2):
        assert torch.equal(greedy(engine, kinds.LENGTHS), expected)
        engine.clear()
        assert status(engine) == "on"
    assert recorder.replayed == 2 * (OUTPUT_LEN - 1) - 1 - 2, "all steps but those that wait"
    assert engine._ragged.able == by_name


VERIFIED = (3, 3, 1, 3, 2, 3, 2, 1, 2, 3, 1, 2, 1, 3, 3)  # tokens of a row in one step after the other


def verified(engine: Engine, keep_all: bool = True) -> list[Tensor]:
    """Return the logits of steps of several tokens a row. Rows keep different numbers of them, then there are fewer
    rows."""
    logits_of_steps = []
    batch, _ = passes.prefill(engine, *prompts((9, 5, 7)), 64)
    for step, count in enumerate(VERIFIED):
        given = torch.arange(4 + step, 4 + step + 3 * count).view(3, count)[: batch.batch_size]
        before = batch.length
        logits_of_steps += engine.forward([Work(batch, given, count if keep_all else 1)])
        if count > 1 and step % 2:
            engine.rollback(batch, before + torch.tensor([1, count, 2])[: batch.batch_size])
        if step == 10:
            engine.retire(batch, [1])
    return logits_of_steps


@pytest.mark.parametrize(
    ("architecture", "offload", "keep_all"),
    [
        *product(("llama", "bloom", "falcon"), ("none",), (True, False)),
        *product(("llama", "bloom"), ("cpu",), (True,)),
    ],
)
def test_steps_of_several_tokens_are_recorded(
    architecture: str, offload: Offload, keep_all: bool, checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun
) -> None:
    """Verifying steps return logits of all tokens, others the last. A model with a mask has graphs of single tokens."""
    runs, several = [], architecture != "falcon"
    for option in ("off", "auto"):
        engine = load("stream", checkpoint(architecture), offload, tmp_path, cuda_graphs=option)
        runs.append(verified(engine, keep_all))
        on = "on" if offload == "none" else BY_LAYER
        assert status(engine) == ("off" if option == "off" else on)
    assert all(close(actual, other) for actual, other in zip(*runs, strict=True))
    assert recorder.replayed >= (8 if several else 2)
    if offload == "none":
        assert set(recorder.kept) == ({1, 2, 3} if several and keep_all else {1})


@pytest.mark.parametrize(("count", "fewest"), [(1, 15), (5, 2)])
def test_tokens_of_drafts_are_those_of_decoding_one_by_one(
    count: int, fewest: int, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch, recorder: Rerun
) -> None:
    """A row alone keeps its memory, and so its graphs; rows that advance by different lengths change it often."""
    test_continuous.small(monkeypatch)
    tune(monkeypatch, longest_wait=1, bucket=64)
    engine = load("stream", checkpoint("llama"), "none", tmp_path)
    rows = test_continuous.alike(count, 8, 80 if count == 1 else 40)
    expected = test_drafts.answers(engine, rows)
    before = recorder.kept.copy()
    running = test_drafts.drafting(engine, monkeypatch, expected, 0.4)
    running.schedule.step = 64
    test_drafts.check(test_continuous.run(running, [rows[:3], rows[3:]]), expected)
    running.end()
    assert sum(times for kept, times in (recorder.kept - before).items() if kept > 1) >= fewest


def test_graphs_are_bounded_in_number_and_the_one_used_last_stays(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch, recorder: Rerun
) -> None:
    tune(monkeypatch, max_graphs=2, bucket=128)
    engine: Any = load("stream", checkpoint("llama"), "none", tmp_path)
    batch, _ = passes.prefill(engine, *prompts((5, 3)), 64)
    kept = []
    for count in (1, 1, 2, 2, 1, 3, 3, 1, 1):
        engine.forward([Work(batch, torch.full((2, count), 9), count)])
        ((_, graph_set),) = engine._graphs._graph_sets.items()
        kept.append([shape[0] for shape, _ in graph_set.graphs])
    assert kept == [[], [1], [1], [1, 2], [2, 1], [2, 1], [1, 3], [3, 1], [3, 1]]


@pytest.mark.parametrize("way", ["fails", "off"])
def test_steps_of_several_tokens_are_given_up_apart(
    way: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch, recorder: Rerun
) -> None:
    """Single-token graphs go on where those of several tokens fail. Those cannot be recorded, or give other logits."""
    real = recorder.record

    def record(run: Run) -> Run:
        if (several := run().shape[1] > 1) and way == "fails":
            raise RuntimeError("no such thing")
        replay = real(run)
        return (lambda: replay() + 1) if several else replay

    monkeypatch.setattr(recorder, "record", record)
    engine: Any = load("stream", checkpoint("llama"), "none", tmp_path)
    without = load("stream", checkpoint("llama"), "none", tmp_path, cuda_graphs="off")
    assert all(close(actual, other) for actual, other in zip(verified(engine), verified(without), strict=True))
    assert not engine._graphs.takes_several
    assert engine._graphs.wanted
    assert recorder.kept[1] == 2, "single tokens are replayed, but those that wait"
    assert not any(shape[0] > 1 for graph_set in engine._graphs._graph_sets.values() for shape, _ in graph_set.graphs)


def test_a_micro_batch_of_the_same_shape_takes_memory_and_graphs_over(
    checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun
) -> None:
    engine: Any = load("stream", checkpoint("opt"), "none", tmp_path)
    seen, answers = list[tuple[Any, int]](), reference(checkpoint("opt"))
    batch: Any
    for index in (0, 0, 0, 1):
        batch, logits = passes.prefill(engine, *prompts(BATCHES[index]), OUTPUT_LEN)
        tokens = [logits.argmax(-1)]
        while len(tokens) < OUTPUT_LEN:
            tokens.append(passes.decode(engine, batch, tokens[-1]).argmax(-1))
        assert torch.equal(torch.stack(tokens, dim=1), answers[index])
        memory = batch.cache.layers[1].memory
        seen.append((memory[0], recorder.recorded))
        with torch.inference_mode():
            for part in memory:
                part.fill_(float("nan"))  # what this batch leaves must not be seen
        engine.retire(batch)
    assert seen[0][0] is seen[1][0] is seen[2][0] is not seen[3][0]
    assert seen[0][1] == seen[1][1] == seen[2][1] < seen[3][1]
    assert len(engine._graphs._spare) == 1
    engine.clear()
    assert not engine._graphs._spare


@pytest.mark.parametrize(
    ("offload", "way", "reason"),
    [
        ("none", "fails", "a decode step cannot be recorded: no such thing"),
        ("none", "off", "their results differ from those of a step without them"),
        ("none", "memory", "no GPU memory for them"),
        ("cpu", "fails", "cannot be recorded: no such thing"),
        ("cpu", "off", "differ from"),
    ],
)
def test_graphs_that_are_of_no_use_are_given_up(
    offload: Offload, way: str, reason: str, checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun
) -> None:
    directory = checkpoint("bloom" if offload == "none" else "llama")
    engine = load("stream", directory, offload, tmp_path)
    recorder.fails = {"fails": RuntimeError("no such thing\nmore"), "memory": torch.OutOfMemoryError("x")}.get(way)
    recorder.off = 9.0 if way == "off" else 0.0
    for _ in range(3):
        check(engine, directory, offload)
    assert reason in status(engine)
    if offload == "none":
        assert recorder.recorded == {"fails": 0, "memory": 0, "off": 2}[way]


@pytest.mark.parametrize("wrong", ["", "positions", "experts", "logits"])
def test_rounding_that_grows_in_a_model_is_no_difference(
    wrong: str, checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun, monkeypatch: Patch
) -> None:
    """Static passes may be a twentieth off.

    So they are where a token gets other experts in the last layer. They are not believed if they see every other
    position only, have other experts in each layer, or record other logits.
    """
    tune(monkeypatch, may_differ=0.5, observed=2)  # the model has two layers, the batches three rows
    engine: Any = load("stream", directory := checkpoint("mixtral"), "none", tmp_path)
    layers, real_seen, real_static = engine.model.model.layers, graphs.StaticKV.seen, graphs.Graphs._static

    def seen(self: Any, end: int, count: int) -> Tensor:
        visible = real_seen(self, end, count)
        visible[..., 1::2] &= wrong != "positions"
        return visible

    def static(*args: Any) -> Tensor:
        changed = layers if wrong == "experts" else layers[-1:]
        kept = [(layer.mlp.experts.down_proj, layer.mlp.experts.down_proj.clone()) for layer in changed]
        with torch.inference_mode():
            for weight, _ in kept:
                weight *= 1.2
            logits = real_static(*args).clone()
            for weight, before in kept:
                weight.copy_(before)
        return logits

    compared, alike = list[bool](), graphs.alike

    def noted(*both: Tensor) -> bool:
        compared.append(alike(*both))
        return compared[-1]

    monkeypatch.setattr(graphs, "alike", noted)
    monkeypatch.setattr(graphs.StaticKV, "seen", seen)
    monkeypatch.setattr(graphs.Graphs, "_static", static)
    recorder.off = 0.01 if wrong == "logits" else 0.0
    if wrong:
        check_tokens(engine, directory)
    else:
        greedy(engine, BATCHES[0])
    assert not compared[0]
    assert status(engine) == ("their results differ from those of a step without them" if wrong else "on")


def test_wrong_keys_of_a_replay_are_taken_back(
    checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun, monkeypatch: Patch
) -> None:
    real = graphs.StaticLayer.update

    def wrong(self: Any, key_states: Tensor, value_states: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return real(self, key_states + 1, value_states - 1, *rest)

    monkeypatch.setattr(graphs.StaticLayer, "update", wrong)
    engine = load("stream", checkpoint("llama"), "none", tmp_path)
    check(engine, checkpoint("llama"), "none")
    assert recorder.recorded
    assert status(engine).startswith("their results differ")


def test_a_model_that_attends_in_its_own_way_gets_a_mask(
    checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun, monkeypatch: Patch
) -> None:
    real = attention.attention

    def changed(module: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        return real(module, query, key * 1, *rest, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.JOINED, changed)
    engine: Any = load("stream", checkpoint("llama"), "none", tmp_path)
    check(engine, checkpoint("llama"), "none")
    assert engine._ragged.able is False
    assert status(engine) == "on"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("mamba", {}, "layers hold more than keys and values"),
        ("mistral", {"kv_cache_dtype": "int8"}, "the KV cache is in host memory or in 8 bits"),
        ("mistral", {"kv_offload": "cpu"}, "keys and values are in host memory"),
        ("mistral", {"cuda_graphs": "off"}, "off"),
        ("mistral", {}, "no GPU"),
    ],
)
def test_what_cannot_be_recorded_runs_as_before(
    name: str, options: dict[str, Any], reason: str, kind: kinds.Kinds, recorder: Rerun, monkeypatch: Patch
) -> None:
    if reason == "no GPU":
        monkeypatch.setattr(graphs, "recorder_of", recorder_of)
    engine = load("stream", kind(name), "none", **options)
    greedy(engine, kinds.LENGTHS, 4)
    assert status(engine) == reason
    assert not recorder.recorded


def test_graphs_that_do_not_pay_are_recorded_later(
    checkpoint: Checkpoints, tmp_path: Path, recorder: Rerun, monkeypatch: Patch
) -> None:
    tune(monkeypatch, bucket=128)
    engine: Any = load("stream", checkpoint("llama"), "none", tmp_path)
    token_ids, mask = prompts((5, 3))
    waits = list[int]()
    for steps in (4, 5, TUNED.pays + 8):
        batch, _ = passes.prefill(engine, token_ids, mask, steps)
        for _ in range(steps):
            passes.decode(engine, batch, token_ids[:, 0])
        engine.retire(batch)
        engine._graphs.make_room(0, 0)
        waits.append(engine._graphs.wait)
    assert waits == [2, 4, 2]
    assert recorder.recorded == 3


def test_recorded_lengths_grow_by_an_eighth_and_end_at_the_capacity() -> None:
    ends = [end_of(length, 1 << 20) for length in range(1, 9000)]
    assert ends == sorted(ends)
    assert all(length <= end < length + max(128, length / 4) for length, end in enumerate(ends, 1))
    assert len(set(ends)) < 16 + 4 * 8
    assert [end_of(length, 600) for length in (1, 128, 129, 513, 600)] == [128, 128, 256, 600, 600]


@pytest.mark.parametrize("number", [0.5, 3, True, float("-inf")])
@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"device": "cpu", "dtype": torch.bfloat16}])
def test_constants_are_made_on_the_device(number: float, options: dict[str, Any]) -> None:
    expected = torch.tensor(number, **options)
    with graphs.ConstantsOnDevice():
        actual = torch.tensor(number, **options)
        assert torch.tensor([number]).shape == (1,)
    assert torch.equal(actual, expected)
    assert actual.dtype == expected.dtype
