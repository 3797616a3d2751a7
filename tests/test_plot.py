"""Figures: every point is drawn, nothing unknown is drawn, nothing overlaps, and the bytes are the same every time."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests import environment, invoke, mentions
from tests.command import zinfer_process
from tests.results import case, point, sweep, traced
from zinfer.analysis.group import Metric, groups, samples
from zinfer.record.measurement import Effective, Measurement, Span, spans
from zinfer.record.store import Store
from zinfer.report.plot import figures as plot
from zinfer.report.plot import style as chart
from zinfer.report.plot.style import said

pytestmark = pytest.mark.long

LLAMA: dict[str, Any] = {"model": "meta-llama/Llama-3.3-70B-Instruct", "layers": None}
CROWD = [
    point(case(size, *load, options=options, **LLAMA), 1.3 + 0.01 * size, status="oom_gpu" if size == 96 else "ok")
    for load in product(("stream", "deepspeed", "accelerate", "tensorrt", "vendor"), ("none", "cpu"))
    for options in ((), (("gpu_weights", "40GiB"), ("kv_offload", True)))
    for size in (1, 3, 24, 28, 64, 96)
]
TWELVE = [point(case(2**power), 1.3) for power in range(12)]
CODED = (("weight_codec", "lossless"),)
TRACED = [
    point(case(8), 1.28, timeline=traced(compute_ms=3.1)),
    point(case(64), 1.28, timeline=traced()),
    point(case(64, options=CODED), 0.86, timeline=traced(copy_ms=60.5, decode_ms=6.2)),
    point(case(64, options=(("kv_offload", True), *CODED), gpu_weights="40GiB"), 2, timeline=traced(70, 1e3, 12, 1e2)),
    point(case(64, options=(("ring_depth", 3),)), 2.5, timeline=traced(running=True)),
    point(case(32, "deepspeed"), 1.5),
]
DATA = {"sweep": sweep(), "crowd": CROWD, "twelve": TWELVE, "one": [point(case(24), repeats=1)], "traced": TRACED}


def drawn(points: Sequence[Measurement]) -> dict[str, Figure]:
    ((group, members),) = groups(points).items()
    return plot.draw(group, members)


@cache
def shown(name: str) -> dict[str, Figure]:
    """Return the figures of a set of `DATA`, drawn once; tests must not change them."""
    return drawn(DATA[name])


def values(data: Any) -> list[float]:
    """Return the coordinates of a line."""
    return [float(value) for value in data]


def measured(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """Return the solid lines by label."""
    return {
        str(line.get_label()): (values(line.get_xdata()), values(line.get_ydata()))
        for line in axes.lines
        if line.get_linestyle() == "-" and not str(line.get_label()).startswith("_")
    }


def crosses(figure: Figure) -> set[float]:
    lines = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "x"]
    return {x for line in lines for x in values(line.get_xdata())}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for machine in ("h100", "h200"):
        with Store(tmp_path / "results" / machine / "bloom.jsonl") as store:
            store.append(*(row.model_copy(update={"machine": machine}) for row in sweep()))
    return tmp_path / "results"


def test_throughput_shows_every_usable_point() -> None:
    lines = measured(shown("sweep")["throughput"].axes[0])
    dots = sorted((x, y) for xs, ys in lines.values() for x, y in zip(xs, ys, strict=True))
    usable = [point for point in sweep() if point.usable]
    assert dots == sorted((p.case.workload.batch_size, p.output_tok_s) for p in usable)


def test_latency_is_drawn_over_throughput_for_every_usable_point() -> None:
    usable = [point for point in sweep() if point.usable]
    metrics: tuple[Metric, ...] = ("ttft_ms", "tpot_ms")
    for axes, metric in zip(shown("sweep")["latency"].axes, metrics, strict=True):
        dots = [pair for xs, ys in measured(axes).values() for pair in zip(xs, ys, strict=True)]
        waits = [(p.output_tok_s, fmean(samples(p, metric)) / 1e3) for p in usable]
        assert sorted(dots) == sorted(waits)
        sizes = {int(text.get_text()) for text in axes.texts}
        assert sizes == {1, 8, 16, 32, 64}, "the smallest and the largest batch of each line"


def test_out_of_memory_is_a_cross_at_the_batch_that_failed() -> None:
    figure = shown("sweep")["throughput"]
    assert crosses(figure) == {16, 64, 128}
    texts = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"out of memory: stream none", "out of memory: deepspeed cpu", "failed: accelerate cpu"} <= texts
    assert crosses(shown("twelve")["throughput"]) == set()


def test_unknown_values_are_not_drawn() -> None:
    """Failed or incomplete points leave no mark, not even at zero. Incomplete is one without link bandwidth or decode
    steps."""
    points = [point(case(2), link_bandwidth=None), point(case(4), effective=None), point(case(8), status="nan_output")]
    figures = drawn([point(case(1)), *points])
    assert measured(figures["throughput"].axes[0])["stream cpu"][0] == [1, 2, 4]
    assert [len(measured(axes)) for axes in drawn([point(case(1, output_len=1))])["latency"].axes] == [1]
    assert drawn([point(case(1), status="oom_gpu")]) == {}


def labels(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_timeline_shows_the_fastest_configurations() -> None:
    figure = shown("traced")["timeline"]
    assert len(figure.axes) == 3
    heads = [labels(axes)[0] for axes in figure.axes]
    long = "stream cpu gpu-weights=40GiB kv_offload=True weight_cod…"
    assert [head.split(", batch")[0] for head in heads] == ["stream cpu weight_codec=lossless", "stream cpu", long]
    assert mentions(heads[1], "stream cpu", "batch 64", "1,277.5 ms", "timed")
    assert "3 of 4" in figure.texts[1].get_text()
    assert len({axes.get_xlim() for axes in figure.axes}) == 1, "whole steps share a scale"
    busy, waits = labels(figure.axes[0])[1:]
    assert mentions(busy, "link 99.2%", "unpack 10.2%", "compute 5.9%", "54.3 GB/s", "99.5%")
    assert mentions(waits, "link", "6.9 ms", "0.8%")


def test_the_timeline_tells_chosen_and_guessed_experts_apart() -> None:
    spans = traced(copy_ms=60.5, decode_ms=6.2)
    shared = tuple(
        span._replace(carries=(None, "expert", "guess")[(span.layer or 0) % 3]) if span.lane == "copy" else span
        for span in spans
    )
    for some, expected in ((spans, 0), (shared, 2)):
        figure = drawn([point(case(8), timeline=some)])["timeline"]
        labelled = {patch.get_label() for axes in figure.axes for patch in axes.patches}
        assert sum(f"{kind} experts cross the link" in labelled for kind in ("chosen", "guessed")) == expected


def test_the_timeline_shows_the_disk_above_the_link() -> None:
    figure = drawn([point(case(8, offload="nvme"), timeline=slow_disk())])["timeline"]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["disk", "link", "compute"]
    labels = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "Busy: disk 100.0%, link 51.8%, compute 7.8%" in labels


def slow_disk() -> tuple[Span, ...]:
    """Return a step of 10 layers that waits for the disk. Each is read in 40 ms while the last requests of the one
    before go on, and copied in 20 ms."""
    rows: list[tuple[str, int, float, float]] = [("disk", 9, -35, 2)]
    for layer in range(10):
        arrived = 40.0 * layer + 2
        rows += [("disk", layer, 40 * layer, arrived + 40), ("copy", (layer + 9) % 10, arrived, arrived + 20)]
        rows.append(("compute", (layer + 9) % 10, arrived + 21, arrived + 24))
    return spans(rows)


def test_the_timeline_of_several_gpus_shows_each_with_its_gathers() -> None:
    single = traced(running=True)
    gathers = [span._replace(lane="gather", end_ms=span.start_ms + 9) for span in single[-30:-2]]
    double = (*single, *(span._replace(rank=1) for span in (*traced(launch_ms=40.0), *gathers)))
    alone, both = (
        drawn([point(case(8, options=options), timeline=spans)])["timeline"]
        for options, spans in (((), single), ((("gpus", 2),), double))
    )
    (whole,) = both.axes
    names = [label.get_text() for label in whole.get_yticklabels()]
    assert names == ["link 0", "compute 0", "link 1", "gather 1", "compute 1"]
    assert both.get_size_inches()[1] > alone.get_size_inches()[1] + 3 * 15 / 72
    first, _, second, _ = labels(whole)[1:]
    assert mentions(first, "GPU 0 busy", "link 100.0%")
    assert mentions(second, "GPU 1 busy", "gather")


def test_a_timeline_of_many_spans_draws_what_can_be_seen() -> None:
    """20,000 spans of a step; drawn one by one they took minutes and an SVG file of megabytes."""
    rows = [[lane, layer, at + start, at + start + 0.06]
            for nth in range(10_000) for layer, at in [(nth // 100, nth * 0.1)]
            for lane, start in (("copy", 0.0), ("compute", 0.02))]  # fmt: skip
    figure = drawn([point(case(8), timeline=rows)])["timeline"]
    content = chart.render(figure, "svg")
    assert len(content) < 200_000
    assert any("The link waits 400.0 ms (40.0%)" in text for text in labels(figure.axes[0]))


def test_only_traced_steps_over_a_link_make_a_timeline() -> None:
    compute = tuple(span for span in traced() if span.lane == "compute")
    assert "timeline" not in shown("sweep")
    assert "timeline" not in drawn([point(case(1), timeline=compute)])
    failed = point(case(2), timeline=traced()).model_copy(update={"status": "offload_not_effective"})
    assert "timeline" not in drawn([point(case(1)), failed])


@pytest.mark.parametrize("name", DATA)
def test_axes_hold_all_their_points_and_titles_legend_and_data_do_not_overlap(name: str) -> None:
    for figure in shown(name).values():
        for axes in figure.axes:
            (left, right), (low, high) = axes.get_xlim(), sorted(axes.get_ylim())
            for line in axes.lines:
                if line.get_marker() not in ("None", "x", "+"):
                    assert all(left < x < right for x in values(line.get_xdata()))
                    assert all(low < y < high for y in values(line.get_ydata()))
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        labels = [item.get_window_extent(renderer) for item in (figure.legends[0], *figure.texts)]
        panels = [box for axes in figure.axes if (box := axes.get_tightbbox(renderer))]
        assert len(panels) == len(figure.axes)
        for nth, box in enumerate([*labels, *panels]):
            assert all(figure.bbox.contains(x, y) for x, y in box.get_points())
            assert not any(box.overlaps(other) for other in [*labels[nth + 1 :], *panels] if nth < len(labels))


def test_limits_are_dashed_and_lie_above_what_crosses_the_link() -> None:
    axes = shown("sweep")["throughput"].axes[0]
    lines = measured(axes)
    limits = {str(line.get_linestyle()): line for line in axes.lines if line.get_linestyle() in ("--", ":")}
    uncoded = ["stream cpu", "deepspeed cpu"]
    above = {"--": [*uncoded, "stream cpu weight_codec=lossless"], ":": uncoded}
    for style, share in (("--", 0.667), (":", 1)):
        assert limits[style].get_marker() == "None"
        assert ("coded" in str(limits[style].get_label())) == (share < 1)
        (x, _), (y, _) = values(limits[style].get_xdata()), values(limits[style].get_ydata())
        rate = y / x
        assert rate == pytest.approx(54.6e9 / (share * 69_057_937_408))
        for label in above[style]:
            assert all(y < rate * x for x, y in zip(*lines[label], strict=True))


def test_budgets_are_drawn_over_the_weights_that_were_on_the_gpu() -> None:
    points = {(size, 0): point(case(size, "deepspeed"), 1.5) for size in (32, 1)}
    shares = {10: "0%", 30: "50%", 50: "100%"}
    for size, gib in ((1, 10), (1, 30), (32, 10), (32, 30), (32, 50)):
        where: dict[str, Any] = {"effective": Effective(gpu_weight_bytes=gib << 30), "link_bandwidth": None}
        points[size, gib] = point(case(size, gpu_weights=shares[gib]), 1 / gib, **where)
    lines = measured(drawn([*points.values()])["budget"].axes[0])
    assert set(lines) == {"stream cpu", "deepspeed cpu"}
    assert lines["stream cpu"][0] == [gib * 2**30 / 1e9 for gib in (10, 30, 50)]
    assert lines["stream cpu"][1] == [points[32, gib].output_tok_s for gib in (10, 30, 50)]
    assert "budget" not in drawn([p for p in points.values() if p.case.gpu_weights != "50%"])


def test_series_differ_without_colour_and_engines_keep_theirs() -> None:
    loads = {row.case.load for row in CROWD}
    looks = chart.series(sorted(loads, key=lambda load: (load.engine, load.offload, len(load.options))))
    within: dict[str, set[tuple[str, bool]]] = {}
    for load, look in looks.items():
        within.setdefault(load.engine, set()).add((look["marker"], look["markerfacecolor"] == "white"))
    assert all(len(shapes) == 4 for shapes in within.values())
    alone = chart.series([case(1, "deepspeed")])
    assert alone[case(1, "deepspeed")]["color"] == looks[CROWD[24 + 12].case.load]["color"]


@pytest.mark.slow
def test_two_processes_draw_the_same_bytes(results: Path, tmp_path: Path) -> None:
    with Store(results / "h100" / "bloom.jsonl") as store:
        store.append(TRACED[2])
    written = []
    for nth, style in enumerate(["", "font.size: 17\nlines.linewidth: 5\nsavefig.bbox: tight\nsvg.fonttype: none\n"]):
        config, out = tmp_path / f"config{nth}", tmp_path / f"out{nth}"
        config.mkdir()
        (config / "matplotlibrc").write_text(style)
        words = ["plot", str(results / "h100"), "-o", str(out)]
        settings = {"PYTHONHASHSEED": str(nth), "MPLCONFIGDIR": str(config), "TZ": f"UTC{nth}"}
        assert zinfer_process(tmp_path, *words, env=environment(**settings)).returncode == 0
        written.append({path.relative_to(out): path.read_bytes() for path in out.rglob("*.*")})
    assert written[0] == written[1]
    assert len(written[0]) == 6


def test_the_command_prints_what_it_wrote(results: Path, tmp_path: Path) -> None:
    done = invoke("plot", results, "-o", tmp_path / "plots", "--format", "svg")
    assert done.exit_code == 0, done.output
    written = sorted(str(path) for path in (tmp_path / "plots").rglob("*.*"))
    assert sorted(done.stdout.splitlines()) == written
    assert f"{tmp_path}/plots/h200/bloom-throughput.svg" in written
    assert len(written) == 4


def test_a_sweep_of_several_groups_gets_a_set_for_each(tmp_path: Path) -> None:
    with Store(tmp_path / "two.jsonl") as store:
        store.append(point(case(1)), point(case(1, input_len=64)))
    done = invoke("plot", tmp_path, "-o", tmp_path / "plots", "--format", "png")
    names = {Path(line).name for line in done.stdout.splitlines()}
    assert {f"two-bloom-176b-14l-{length}-32-bfloat16-dummy-latency.png" for length in (64, 512)} <= names
    assert len(names) == 4


def test_wrong_formats_and_places_are_refused(results: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("")
    for words, code, message in (
        (["--format", "pdf"], 2, "choose from png, svg"),
        (["-o", tmp_path / "occupied"], 5, "cannot write"),
    ):
        refused = invoke("plot", results, *words)
        assert (refused.exit_code, message in refused.stderr) == (code, True)


@pytest.mark.parametrize("name", DATA)
def test_the_text_of_an_svg_is_text(name: str) -> None:
    for figure in shown(name).values():
        svg = chart.render(figure, "svg")
        root = ElementTree.fromstring(svg)
        written = [str(element.text) for element in root.iter("{http://www.w3.org/2000/svg}text")]
        for text in (*figure.texts, *figure.legends[0].get_texts(), *figure.axes[0].texts):
            assert all(line in written for line in text.get_text().split("\n"))
        assert root.get("role") == "img"
        assert [element.tag.split("}")[1] for element in root][:2] == ["title", "desc"]
        assert root[0].text == chart.said(figure, "title")


def test_a_noisy_winner_is_not_the_fastest_alone() -> None:
    waits = (("cpu", (100.0, 160.0, 130.0)), ("none", (110.0, 180.0, 145.0)))
    points = [point(case(8, offload=where, output_len=2), ttft_ms=ms, step_ms=((1.0,),) * 3) for where, ms in waits]
    ((group, members),) = groups(points).items()
    note = said(plot.draw(group, members, ["throughput"])["throughput"], "note")
    assert mentions(note, "stream cpu", "±", "As fast within the noise: stream none at batch 8")
    assert "one repeat" in said(plot.draw(group, [point(case(8), repeats=1)], ["throughput"])["throughput"], "note")
