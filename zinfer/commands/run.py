"""`zinfer run`: generate text with a model larger than the GPU."""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import click

from zinfer.commands import options
from zinfer.commands.chat import ANSWER, CONTEXT, Dialogue, Stop, chat_options, object_of, prompt_request, talk, turns
from zinfer.commands.failure import Failure
from zinfer.commands.options import option
from zinfer.commands.verb import TEXT, Verb
from zinfer.commands.watch import Watch
from zinfer.core.engine import ENGINES
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.model import ModelError, check_positions
from zinfer.core.request import Sampling
from zinfer.core.units import counted, duration, figures
from zinfer.generation.schedule import largest_load
from zinfer.generation.tokenizer_process import Prompt, Refusal, TokenizerProcess
from zinfer.job.batch.packing import best_plan
from zinfer.job.driver import Driver
from zinfer.job.openai import check_tokens, read_grammar, read_sampling
from zinfer.job.recipe import engine_recipe
from zinfer.job.structure import PLAIN, Form, form_of
from zinfer.system import documents
from zinfer.system.printable import show_generated, shows_unicode, text_lines
from zinfer.worker.process import WorkerError
from zinfer.worker.tasks import BatchStart, BatchStep, BatchStepped

STREAM_S = 0.05  # seconds of decoding before new text is shown


def _bias(text: str) -> dict[str, float]:
    pairs = [word.partition("=") for word in text.split(",")]
    return {token.strip(): float(value) for token, _, value in pairs}


TOKENS = options.comma_list("ID,..", int, "token ids with commas between")
BIAS = options.Parsed("ID=X,..", _bias, "token ids and what is added, as 11=-100,42=2.5")
DRAWN = ("top_p", "top_k", "min_p")  # without an effect on greedy text
EDITS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "min_tokens")
sampling_options = options.option_group(  # as in bodies of requests, which have the same limits
    option("--top-k", int, "Sample among so many tokens; 0 is all.  [default: 0]"),
    option("--min-p", float, "Sample among tokens with this share of the likeliest one's chance.  [default: 0]"),
    option("--repetition-penalty", float, "Divide logits of tokens in prompt or answer by this.  [default: 1]"),
    option("--presence-penalty", float, "Take this from logits of tokens in the answer.  [default: 0]"),
    option("--frequency-penalty", float, "Take this from logits for each time in the answer.  [default: 0]"),
    option("--logit-bias", BIAS, "Add to the logits of tokens, -100 to 100 each."),
    option("--stop-token-ids", TOKENS, "Tokens that end an answer, too."),
    option(
        "--structured-outputs",
        options.Parsed("JSON", object_of),
        'Grammar of an answer: {"json": SCHEMA}, {"regex": ..}, {"choice": [..]} or {"grammar": ..}.',
    ),
    option("--min-tokens", int, "Tokens of an answer before it may end.  [default: 0]"),
)


@click.command("run", cls=Verb)
@options.any_model
@options.engine
@options.offload_if_needed
@option("-p --prompt prompts", str, "A prompt. Repeatable; without one each line of stdin is a prompt.", multiple=True)
@option("--prompt-file", click.Path(exists=True, allow_dash=True), "File with a prompt in each line; - is stdin.")
@option("--max-tokens --output-len output_len", options.COUNT, "Most tokens of an answer.  [default: 32; chat: 512]")
@option("--batch-size", options.COUNT, "Prompts at once.  [default: all that fit]")
@option("--temperature", options.AMOUNT, "0 is greedy.", default=0.0)
@option("--top-p", options.SHARE, "Sample among the likeliest tokens of this share.", default=1.0)
@sampling_options
@option("--seed", int, "Seed of the sampling.", default=0)
@option("--ignore-eos", bool, "Generate all --max-tokens, past the end of a text.")
@chat_options
@options.load_options
@options.weights
@options.timeout(36000, "the whole run")
@option("--json as_json", bool, "Print JSON: a list with an object a prompt, or with --chat a line a turn.")
@click.pass_obj
def command(debug: bool, /, chat: bool, as_json: bool, **how: Any) -> None:
    """Continue prompts with a model of any size. Greedy unless --temperature is set. Ctrl-C keeps the text so far.

    With --chat they are turns of one conversation, with the model's chat template if it has one. Its KV cache
    stays in host memory, so that a turn computes little more than its new tokens. Ctrl-C ends an answer.

    \b
    zinfer run ./my-checkpoint --prompt "Once upon a time"
    zinfer run --model bigscience/bloom-560m --offload cpu --prompt-file prompts.txt --json
    zinfer run --model ./my-checkpoint --chat
    """
    prompts, prompt_file, batch_size = how["prompts"], how["prompt_file"], how["batch_size"]
    _check_options(chat, batch_size, how["temperature"])
    output_len = how["output_len"] or (ANSWER if chat else 32)
    texts = [] if chat and not (prompts or prompt_file) else _prompts(prompts, prompt_file)
    recipe = engine_recipe(how["engine"])
    if chat and "kv_offload" in ENGINES[recipe.engine].defaults.keys() - recipe.options.keys():
        how["settings"].setdefault("kv_offload", ("none",))  # a conversation goes on from a KV cache on the GPU alone
    job = options.prepared("run", how)
    spec, tokenizer = job.source.spec, job.tokenizer
    form = form_of(tokenizer.facts) if chat else PLAIN
    sampling = _sampling(how, form)
    check_tokens(sampling, spec.vocab_size)
    ends = tokenizer.facts.differing_ends
    dialogue = Dialogue(tokenizer, how["system"], how["chat_template_kwargs"]) if chat else None
    prompt_ids = [] if chat else _encoded(tokenizer, texts, sampling.grammar)
    longest = max(map(len, prompt_ids), default=1)
    check_positions(spec, longest, 1 if chat else output_len, f"a prompt of {longest} tokens")
    machine = options.this_machine(how["nvme_path"])
    length = min(CONTEXT, max(1, (spec.max_position or CONTEXT) - output_len)) if chat else longest
    rows = batch_size or max(1, len(texts))
    plan = best_plan(job.cases(length, output_len), [(length, output_len)] * rows, spec, machine, how["nvme_path"])
    planner = plan.planner()
    if not plan.fits:
        raise Failure(str(plan.why_not), ENVIRONMENT)
    with Watch() as watch:
        if ends is not None:
            watch.message(ends)
        try:
            with Driver(watch.workers(job.target, how["timeout_s"], debug), watch.loading) as driver:
                driver.load(plan, early=True)
                if dialogue is not None:
                    watch.quiet()
                    room = largest_load(planner, [(length, output_len)], 1)
                    opening = BatchStart(load=room, rows=1, arrivals=True, cache_size=how["kv_cache_size"])
                    limits = output_len, spec.max_position, sampling, how["ignore_eos"]
                    with driver.lend() as worker:
                        talk(worker, dialogue, turns(texts), opening, limits, watch.message, as_json, form)
                    return
                if sys.stdout.isatty() and not as_json:
                    watch.quiet()
                rows = batch_size or max(1, min(len(texts), plan.max_batch_size))
                workload = largest_load(planner, [(len(ids), output_len) for ids in prompt_ids], rows)
                asked = output_len, sampling, how["ignore_eos"]
                requests = [prompt_request(number, ids, *asked) for number, ids in enumerate(prompt_ids)]
                answers = Answers(texts, list(map(len, prompt_ids)), as_json)
                with Stop() as stop, driver.lend() as worker:
                    worker.ask(BatchStart(load=workload, rows=rows))
                    while not answers.all_ended and not stop.asked:
                        answer_s = STREAM_S if answers.all_begun else 0
                        answers.add(worker.ask(BatchStep(requests=requests, answer_s=answer_s)))
                        requests = []
                        watch.progress("generating", answers.tokens / (len(texts) * output_len))
                if not answers.all_ended:
                    driver.end(kill=True)
                    answers.end()
                    watch.message("interrupted; the text so far is kept")
                    raise SystemExit(130)
                answers.end()
        except WorkerError as error:
            raise Failure(error.line, error.exit_code) from None
        watch.message(answers.summary())


class Answers:
    """Answers to prompts on stdout. As they come, in the prompts' order, or as JSON at the end."""

    def __init__(self, prompts: list[str], lengths: list[int], as_json: bool) -> None:
        self.tokens, self.seconds = 0, 0.0
        self.prompt_seconds, self._generated = 0.0, 0  # seconds of steps that computed prompts; tokens of other steps
        self.passes = self.drafted = self.accepted = 0
        self._as_json, self._begun, self._ended = as_json, 0, 0
        self._answers: list[dict[str, Any]] = [
            {"prompt": prompt, "output_ids": [], "output_text": "", "finish_reason": "interrupted",
             "prompt_tokens": length, "prompt_tok_s": None, "ttft_s": None, "decode_tok_s": None}
            for prompt, length in zip(prompts, lengths, strict=True)
        ]  # fmt: skip
        self._shown, self._length = 0, 0  # prompts shown to their end; characters shown of the next one

    @property
    def all_begun(self) -> bool:
        return self._begun == len(self._answers)

    @property
    def all_ended(self) -> bool:
        return self._ended == len(self._answers)

    def summary(self) -> str:
        """Return a line about tokens, seconds and rates."""
        drafts = options.drafts_right(self.drafted, self.accepted)
        passes = f"; {self.passes:,} passes{drafts}" if drafts else ""
        prompts = sum(answer["prompt_tokens"] for answer in self._answers)
        times = [answer["ttft_s"] for answer in self._answers]
        parts = [f"prompts {figures(prompts / self.prompt_seconds)} tok/s"]
        if self._generated:
            parts.append(f"generation {figures(self._generated / (self.seconds - self.prompt_seconds))} tok/s")
        parts.append(f"{'TTFT' if len(times) == 1 else 'median TTFT'} {duration(median(times))}")
        rate = figures(self.tokens / self.seconds)
        return f"{counted(self.tokens, 'token')} in {duration(self.seconds)}: {rate} tok/s ({', '.join(parts)}){passes}"

    def add(self, step: BatchStepped) -> None:
        """Add new tokens of rows, and show the text that is next. Raises Failure for a row that failed."""
        # Until all have begun a step is one pass; it computes prompts if rows run that have no token yet.
        prompting = len(self._answers) - step.waiting > self._begun
        self.seconds += step.seconds
        self.prompt_seconds += step.seconds if prompting else 0.0
        self.passes += step.passes
        self.drafted += step.drafted
        self.accepted += step.accepted
        for update in step.rows:
            if update.failure is not None:
                raise Failure(update.failure.message)
            answer = self._answers[update.key]
            self.tokens += len(update.tokens)
            self._generated += 0 if prompting else len(update.tokens)
            if answer["ttft_s"] is None and (update.tokens or update.ended):
                self._begun += 1
                rate = round(answer["prompt_tokens"] / self.seconds, 3)
                answer |= {"ttft_s": round(self.seconds, 6), "prompt_tok_s": rate}
            answer["output_ids"] += update.tokens
            answer["output_text"] += update.delta
            if update.finish_reason is not None:
                more, decode_s = len(answer["output_ids"]) - 1, self.seconds - answer["ttft_s"]
                rate = round(more / decode_s, 3) if more > 0 and decode_s else None
                answer |= {"output_text": update.text, "finish_reason": update.finish_reason, "decode_tok_s": rate}
                self._ended += 1
        if not self._as_json:
            self._show()

    def end(self) -> None:
        """Show the rest, also of an interrupted run."""
        if self._as_json:
            click.echo(json.dumps(self._answers, indent=1, ensure_ascii=not shows_unicode()))
        else:
            self._show(over=True)

    def _show(self, over: bool = False) -> None:
        while self._shown < len(self._answers):
            answer = self._answers[self._shown]
            text, ended = answer["prompt"] + answer["output_text"], answer["finish_reason"] != "interrupted"
            if answer["output_text"] or ended:
                show_generated(text[self._length :] + "\n" * (ended or over))
                self._length = len(text)
            if not (ended or over):
                return
            self._shown, self._length = self._shown + 1, 0


def _encoded(tokenizer: TokenizerProcess, texts: list[str], grammar: str) -> list[list[int]]:
    """Return the token ids of each prompt. Raises ModelError for a prompt without any, and a wrong grammar."""
    prompts: list[Prompt] = [{"prompt": text, "grammar": grammar} if grammar else text for text in texts]
    prompt_ids = []
    for text, ids in zip(texts, tokenizer.encode(prompts), strict=True):
        if isinstance(ids, Refusal):
            raise ModelError(f"prompt {text[:40]!r}: {ids.message}")
        prompt_ids.append(ids)
    tokenizer.close()
    return prompt_ids


def _check_options(chat: bool, batch_size: int | None, temperature: float) -> None:
    of_a_chat = ("system", "chat_template", "chat_template_kwargs", "kv_cache_size")
    typed = options.typed()
    if not chat and (given := [typed[name] for name in of_a_chat if name in typed]):
        raise click.UsageError(f"{given[0]} is for a conversation: add --chat")
    if chat and batch_size is not None:
        raise click.UsageError("a conversation is one row: leave out --batch-size")
    if not temperature and (given := [typed[name] for name in DRAWN if name in typed]):
        raise click.UsageError(f"{given[0]} has no effect on greedy text: add --temperature, such as 1")


def _sampling(how: dict[str, Any], form: Form) -> Sampling:
    """Return the sampling of the options, for answers of a `form`. Raises Refused for a value out of its limits."""
    given = {name: how[name] for name in (*DRAWN, *EDITS) if how[name] is not None}
    given |= {"stop_token_ids": list(given["stop_token_ids"])} if "stop_token_ids" in given else {}
    settings = {"temperature": how["temperature"], "seed": str(how["seed"]), "grammar": read_grammar(how, form)}
    return read_sampling(given).model_copy(update=settings)


def _prompts(prompts: tuple[str, ...], prompt_file: str | None) -> list[str]:
    """Return the prompts of the options, of the file, or of stdin. Raises UsageError, DocumentError, TextError."""
    texts = list(prompts)
    lines: Iterable[str] = ()
    if prompt_file is not None and prompt_file != "-":
        content = documents.decode(documents.read_bytes(Path(prompt_file)), prompt_file)
        lines = re.split("\r\n?|\n", content)
    elif prompt_file == "-" or not prompts:
        if sys.stdin.isatty():
            raise click.UsageError("no prompt: --prompt TEXT, --prompt-file FILE, or text on stdin, a prompt a line")
        lines = text_lines(sys.stdin, "stdin")
    texts += [line.rstrip("\n") for line in lines if line.strip()]
    if not texts:
        raise click.UsageError("no prompt: the input is empty")
    if (longest := max(map(len, texts))) > TEXT:
        raise click.UsageError(f"a prompt of {longest:,} characters: at most {TEXT:,}")
    return texts
