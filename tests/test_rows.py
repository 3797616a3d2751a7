"""Rows of a batch: each continues as it would alone, with the tokens of `transformers`, whatever stops and joins beside
it."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.test_parity import MACHINE
from zinfer.engine.base import Engine, Work
from zinfer.engine.stream import Stream
from zinfer.generation import rows as worker_side
from zinfer.generation.rows import Row, Rows, chance, choose
from zinfer.job.batch import run as jobs
from zinfer.job.batch.intake import Row as Wanted
from zinfer.job.batch.intake import needs, rows_of
from zinfer.job.batch.ledger import Ledger
from zinfer.job.batch.openai import Request, read_requests
from zinfer.job.batch.packing import best_plan
from zinfer.job.batch.run import Job
from zinfer.plan.plan import Plan
from zinfer.spec.case import Case, Workload
from zinfer.spec.model import from_directory

TEMPLATE = "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
TEMPLATE += "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def request(name: str, body: dict[str, Any], chat: bool = False) -> Request:
    url = "/v1/chat/completions" if chat else "/v1/completions"
    line = json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
    (found,) = read_requests(line.encode())
    assert isinstance(found, Request), found
    return found


class InProcess:
    """Worker without a process: its engine and its rows live in this one."""

    def __init__(self, directory: Path) -> None:
        self.spec = from_directory(directory)
        self.rows_of = Rows(self.spec)
        self.engine: Engine | None = None
        self.reserves: list[int] = []

    def load(self, plan: Plan) -> None:
        self.engine = Stream(plan)

    def serve(self, _service: str, verb: str, **fields: Any) -> Any:
        self.reserves += [fields["reserve"]] if verb == "start" else []
        return json.loads(json.dumps(getattr(self.rows_of, verb)(self.engine, **json.loads(json.dumps(fields)))))

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    kill = close


def plan_for(worker: InProcess, directory: Path, rows: list[Wanted]) -> Plan:
    workload = Workload(batch_size=1, input_len=1, output_len=1)
    case = Case(model=str(directory), engine="stream", offload="cpu", workload=workload, dtype="float32",
                load_format="safetensors")  # fmt: skip
    return best_plan([case], needs(rows), worker.spec, MACHINE)


def answers(
    directory: Path, output: Path, requests: list[Request], **settings: Any
) -> tuple[dict[str, Any], InProcess]:
    """Return the completions by custom_id, and the worker that gave them."""
    worker = InProcess(directory)
    prompts = [(one.chat, one.prompt) for one in requests]
    lengths = worker.serve("rows", "lengths", prompts=prompts)["lengths"]
    rows, faults = rows_of(requests, lengths, worker.spec.max_position, 20, {})
    assert not faults
    with Ledger.open(output, {}, 7) as ledger:
        Job(plan_for(worker, directory, rows), rows, ledger, "m", lambda: worker, **settings).run()
    found = map(json.loads, output.read_text().splitlines())
    return {one["custom_id"]: one["response"]["body"] for one in found}, worker


@pytest.mark.parametrize("architecture", ["llama", "bloom", "opt", "mixtral"])
def test_greedy_answers_are_those_of_each_prompt_alone(
    architecture: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all lengths, three at a time, packed anew again and again, up to the last position of the model."""
    dice = random.Random(4)
    monkeypatch.setattr(worker_side, "ANSWER_S", 0.0)
    monkeypatch.setattr(jobs, "CHECK_S", 0.0)
    monkeypatch.setattr(jobs, "worth_packing_anew", lambda *_: dice.random() < 0.7)
    directory = checkpoint(architecture)
    texts = ["".join(dice.choice("etaoin shrdlu") for _ in range(dice.randint(1, 30))) for _ in range(9)]
    texts.append("x" * 60)
    limits = [dice.randint(1, 24) for _ in range(9)] + [4]
    requests = [
        request(str(key), {"prompt": prompt, "max_tokens": limit, "temperature": 0})
        for key, (prompt, limit) in enumerate(zip(texts, limits, strict=True))
    ]
    found, worker = answers(directory, tmp_path / "out.jsonl", requests, at_most=3)
    assert len(worker.reserves) >= 6
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for key, (prompt, limit) in enumerate(zip(texts, limits, strict=True)):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        whole_ids = whole.generate(ids, max_new_tokens=limit, do_sample=False, pad_token_id=0)
        expected = whole_ids[0, ids.shape[1] :].tolist()
        stopped = 2 in expected
        expected = expected[: expected.index(2)] if stopped else expected
        body = found[str(key)]
        assert body["choices"][0]["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert body["choices"][0]["finish_reason"] == ("stop" if stopped else "length")
        assert body["usage"] == {
            "prompt_tokens": ids.shape[1],
            "completion_tokens": len(expected),
            "total_tokens": ids.shape[1] + len(expected),
        }


def test_sampled_answers_do_not_depend_on_the_batch(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    bodies = [{"prompt": "ab" * size, "max_tokens": 12, "temperature": 1, "top_p": 0.9} for size in range(1, 6)]
    requests = [request(str(key), body) for key, body in enumerate(bodies)]
    alike = [request(name, bodies[0] | {"seed": 5}) for name in ("x", "y")]
    directory = checkpoint("llama")
    together, _ = answers(directory, tmp_path / "a.jsonl", [*requests, *alike])
    apart, worker = answers(directory, tmp_path / "b.jsonl", [*requests, *alike], at_most=1)
    assert len(worker.reserves) == 7
    assert together == apart
    assert together["x"]["choices"] == together["y"]["choices"]
    assert len({body["choices"][0]["text"] for body in together.values()}) == 6


def test_a_row_ends_before_its_stop(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory, body = checkpoint("llama"), {"prompt": "Once upon", "max_tokens": 20, "temperature": 0}
    free, _ = answers(directory, tmp_path / "a.jsonl", [request("free", body)])
    text = free["free"]["choices"][0]["text"]
    tokens = free["free"]["usage"]["completion_tokens"]
    stops: dict[str, Any] = {"one": text[6:9], "first": [text[12:14], text[5:7]], "never": "\u2603", "all": text[0]}
    found, _ = answers(
        directory, tmp_path / "b.jsonl", [request(name, body | {"stop": stop}) for name, stop in stops.items()]
    )
    for name, stop in stops.items():
        choice, usage = found[name]["choices"][0], found[name]["usage"]
        places = [text.index(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text]
        assert choice["text"] == (text[: min(places)] if places else text)
        assert choice["finish_reason"] == ("stop" if places else free["free"]["choices"][0]["finish_reason"])
        assert usage["completion_tokens"] <= tokens
    assert found["all"]["choices"][0]["text"] == ""


def test_a_chat_needs_the_models_template(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = checkpoint("llama")
    rows = Rows(from_directory(directory))
    talk = [{"role": "user", "content": "hi"}]
    (refused, plain, empty) = rows.lengths(None, [(True, talk), (False, "hi"), (False, "")])["lengths"]
    assert refused == "the model has no chat template: use /v1/completions"
    assert (plain, empty) == (2, "the prompt has no tokens: it needs at least one")
    rows._tokenizer.chat_template = TEMPLATE
    talks = rows.lengths(None, [(True, talk), (True, [{"role": "bad", "content": ""}])])["lengths"]
    assert talks == [len("[user]hi[assistant]"), "no such role"]
    assert rows._encode(True, talk) == rows._encode(False, "[user]hi[assistant]")


def row(temperature: float = 1.0, top_p: float = 1.0, seed: str = "s", made: int = 0) -> Row:
    return Row(0, [0] * made, 1, temperature, top_p, seed, ())


def test_a_rows_chances_are_even_and_its_own() -> None:
    drawn = [chance("seed", place) for place in range(2000)]
    assert all(0 <= one < 1 for one in drawn)
    assert abs(sum(drawn) / 2000 - 0.5) < 0.03
    assert len(set(drawn)) == 2000
    assert chance("seed", 1) != chance("other", 1)


def test_sampling_follows_temperature_and_nucleus() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(4000, 1)
    for temperature, top_p, shares in (
        (1.0, 1.0, (0.5, 0.3, 0.15, 0.05)),
        (1.0, 0.6, (0.625, 0.375, 0, 0)),
        (0.5, 1.0, (0.685, 0.247, 0.062, 0.007)),
        (1.0, 0.0, (1, 0, 0, 0)),
        (1e-40, 1.0, (1, 0, 0, 0)),
        (0.0, 1.0, (1, 0, 0, 0)),
    ):
        ids, finite = choose(logits, [row(temperature, top_p, made=place) for place in range(4000)])
        found = torch.bincount(ids, minlength=4) / 4000
        assert torch.allclose(found, torch.tensor(shares, dtype=torch.float), atol=0.025)
        assert bool(finite.all())


def test_a_chance_next_to_one_draws_what_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "chance", lambda _seed, _place: 1 - 2**-53)
    logits = torch.full((2, 1000), float("-inf"))
    logits[:, :7] = torch.rand(2, 7)
    ids, _ = choose(logits, [row(), row(top_p=0.5)])
    assert ids.tolist()[0] == 6
    assert ids.tolist()[1] < 7


def test_rows_of_many_kinds_are_chosen_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "CHUNK", 100)
    logits = torch.rand(7, 50)
    kinds = [row(0.0), row(seed="a"), row(0.7, 0.3, "b"), row(0.0), row(2.0, 1.0, "c", 3), row(seed="d"), row(0.0)]
    ids, _ = choose(logits, kinds)
    alone = [int(choose(logits[index : index + 1], [kind])[0]) for index, kind in enumerate(kinds)]
    assert ids.tolist() == alone


def test_a_row_that_is_not_a_number_fails_alone(checkpoint: Callable[..., Path]) -> None:
    class Broken(Stream):
        def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
            (logits,) = super().forward(works)
            logits = logits.clone()
            logits[1, :, 5] = float("nan")
            return [logits]

    directory = checkpoint("llama")
    worker = InProcess(directory)
    requests = [request(name, {"prompt": name, "max_tokens": 2, "temperature": 1}) for name in "abc"]
    wanted, _ = rows_of(requests, [1, 1, 1], None, 20, {})
    engine = Broken(plan_for(worker, directory, wanted))
    told = Rows(worker.spec).start(engine, [jobs._message(one) for one in wanted], 2)
    engine.close()
    assert [one.get("error") for one in told["rows"]] == [None, "the model's output is not a number", None]
    assert [len(one["tokens"]) for one in told["rows"]] == [1, 0, 1]
