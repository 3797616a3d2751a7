"""Measure two engines with weights in host memory, and draw their throughput over the batch.

python examples/compare_engines.py ./my-checkpoint curve.svg
"""

import sys

import matplotlib.pyplot as plt

import zinfer

model, picture = sys.argv[1:3]
points = zinfer.sweep(
    model, engine=["stream", "accelerate"], offload="cpu", batch_size=[1, 4, 16], output="curve.jsonl"
)
curves: dict[str, list[tuple[int, float]]] = {}
for point in points:
    batch, rate = point.case.workload.batch_size, point.output_tok_s
    print(point.case.label(), batch, point.status, rate)
    if rate is not None:
        curves.setdefault(point.case.engine, []).append((batch, rate))
for engine, curve in curves.items():
    plt.plot(*zip(*curve, strict=True), marker="o", label=engine)
plt.xlabel("batch")
plt.ylabel("output tok/s")
plt.legend()
plt.savefig(picture)
