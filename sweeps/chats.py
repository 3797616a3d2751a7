"""Chats against equal rows: `zinfer batch` on 1,000 requests of mixed lengths beside `zinfer sweep` on equal rows.

    python sweeps/chats.py                                   # 8 layers of Llama-2-70B, at most 9 minutes
    python sweeps/chats.py --model bloom-tiny --layers 0 --requests 40 --rows 8 --input-len 20 --output-len 6

Lengths are log-normal, with the means of chats (245 tokens in, 106 out), at most 1,500 and 400. The two commands take
turns, each with a load of its own, as long as there is time. Points of the sweep, answers and summary.json go to the
folder that --folder names.
"""

import argparse
import json
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path


def log_normal(count: int, mean: float, most: int, sigma: float, dice: random.Random) -> list[int]:
    """Return lengths of a log-normal distribution with this mean before they are cut to `most`."""
    return [max(1, min(most, round(dice.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))) for _ in range(count)]


def zinfer(*words: str, limit_s: float) -> str:
    """Run a command and return what it wrote; print it, too. A command that takes too long is ended."""
    print("$ zinfer", *words, flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "zinfer.cli", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, limit_s), check=False)
        written = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        parts = [part.decode() if isinstance(part, bytes) else part or "" for part in (late.stdout, late.stderr)]
        written = "".join(parts) + "\nended: no time is left"
    print(written.strip(), f"[{time.monotonic() - began:.0f} s]", sep="\n", flush=True)
    return written


def main() -> None:
    """Run the commands in turn and print the rates side by side."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="llama-2-70b")
    options.add_argument("--layers", type=int, default=8, help="0: all")
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--rows", type=int, default=420, help="equal rows of the sweep")
    options.add_argument("--input-len", type=int, default=245)
    options.add_argument("--output-len", type=int, default=106)
    options.add_argument("--most", default="1500,400", help="longest prompt and answer")
    options.add_argument("--sigma", type=float, default=0.8)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=525)
    options.add_argument("--folder", type=Path, default=Path("chats"))
    given = options.parse_args()
    began = time.monotonic()
    given.folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(1)
    most = [int(part) for part in given.most.split(",")]
    known = log_normal(given.requests, given.input_len, most[0], given.sigma, dice)
    left = log_normal(given.requests, given.output_len, most[1], given.sigma, dice)
    prompts = given.folder / "chats.jsonl"
    with prompts.open("w") as file:
        for key, (length, limit) in enumerate(zip(known, left, strict=True)):
            text = "".join(dice.choice("etaoin shrdlu") for _ in range(length))  # random weights: a token is a byte
            body = {"prompt": text, "max_tokens": limit, "temperature": 0}
            line = {"custom_id": str(key), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    means = f"{sum(known) / len(known):.0f} tokens in, {sum(left) / len(left):.0f} out on average"
    print(f"{given.requests} requests: {means}, at most {max(known)} and {max(left)}", flush=True)
    load = ["--model", given.model, "--load-format", "dummy", "--engine", "stream", "--offload", "cpu"]
    load += ["--layers", str(given.layers)] if given.layers else []
    taken, equal, mixed = 0.0, list[str](), list[str]()
    for number in range(given.rounds):
        round_began = time.monotonic()
        if number and given.seconds - (round_began - began) < taken:
            break
        points = given.folder / f"equal-{number}.jsonl"
        points.unlink(missing_ok=True)
        lengths = ["--input-len", str(given.input_len), "--output-len", str(given.output_len), "--repeats", "1"]
        written = zinfer("sweep", *load, "--batch-size", str(given.rows), *lengths, "-o", str(points),
                         limit_s=given.seconds - (time.monotonic() - began))  # fmt: skip
        equal += re.findall(r"([\d.,]+) tok/s", written)
        output = given.folder / f"answers-{number}.jsonl"
        for old in (output, Path(f"{output}.job")):
            old.unlink(missing_ok=True)
        written = zinfer("batch", str(prompts), *load, "-o", str(output),
                         limit_s=given.seconds - (time.monotonic() - began))  # fmt: skip
        mixed += re.findall(r".* tok/s.*padding", written)
        taken = time.monotonic() - round_began
    summary = {"equal rows, tok/s": equal, "chats": mixed}
    (given.folder / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))
    if not equal or not mixed:
        sys.exit("nothing was measured")


if __name__ == "__main__":
    main()
