"""Choose a machine for a model: the fastest at its best batch, and the cheapest by your prices. Nothing runs.

python examples/choose_machine.py gpt-oss-120b
"""

import sys

import zinfer

model = sys.argv[1] if len(sys.argv) > 1 else "gpt-oss-120b"
usd_an_hour = {"rtx-4090": 0.4, "l40s": 0.9, "h100-80gb": 2.5, "h200": 3.5}
plans = zinfer.plan(model, machine=list(usd_an_hour), input_len=512, output_len=256, calibrate=True)
rows = []
for plan in plans:
    if plan.holds and (rate := plan.output_tok_s):
        usd = usd_an_hour[plan.machine.name] / (3.6e-3 * rate)  # a million tokens
        rows.append((rate, usd, plan.machine.name, plan.case.label(), plan.case.workload.batch_size))
for rate, usd, machine, label, batch in sorted(rows):
    print(f"{machine:10} {label:12} batch {batch:5}  {rate:8.1f} tok/s  {usd:6.2f} USD/Mtok")
print("fastest: ", max(rows)[2])
print("cheapest:", min(rows, key=lambda row: row[1])[2])
