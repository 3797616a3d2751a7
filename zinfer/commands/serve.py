"""`zinfer serve`: answer requests over HTTP, in the format of OpenAI's API."""

from functools import partial
from importlib import util
from typing import Any

import click

from zinfer.commands import options
from zinfer.commands.options import option
from zinfer.commands.verb import Failure, Verb
from zinfer.commands.watch import Watch
from zinfer.core.errors import ENVIRONMENT
from zinfer.job.batch.packing import typical_plan
from zinfer.job.openai import served_name
from zinfer.job.structure import form_of

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
KEY = "ZINFER_API_KEY"  # environment variable
LOOPBACK = ("127.", "localhost", "::1")


@click.command("serve", cls=Verb)
@options.any_model
@option(
    "--served-model-name served_names",
    str,
    "Name of the model in requests; answers have the first. Repeatable.  [default: the last part of MODEL]",
    multiple=True,
    metavar="NAME",
)
@option("--host", str, "Address to listen at; 0.0.0.0 is every one.", default="127.0.0.1", metavar="ADDRESS")
@option("--port", click.IntRange(0, 65535), "Port; 0 is any that is free.", default=8000)
@option("--api-key", str, "Key that requests must send, but for /health.", metavar="KEY", envvar=KEY, show_envvar=True)
@option("--max-queue", options.COUNT, "Rows that may wait for their first token; more get status 429.", default=1024)
@option("--max-body", options.SIZE, "Largest body of a request; larger ones get status 413.", default="16MiB")
@option("--kv-cache-size", options.SIZE, "Host memory for KV caches that later requests reuse.", default="8GiB")
@option("--drain drain_s", options.AMOUNT, "Seconds that running requests have at SIGTERM.", default=30)
@option("--quiet", bool, "Print no line about each request.")
@options.job_options
@click.pass_obj
def command(debug: bool, /, host: str, port: int, api_key: str | None, quiet: bool, **how: Any) -> None:
    """Serve a model: /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics.

    Requests run together: each begins at the next pass, as soon as there is memory for it, and ends on its own. Where
    memory is short, requests share it, however many answers each asks for. The client of OpenAI works with it,
    streaming included.

    \b
    zinfer serve ./my-checkpoint
    zinfer serve bigscience/bloom-560m --offload cpu --port 9000
    curl http://127.0.0.1:8000/v1/completions --json '{"prompt": "Once upon a time", "max_tokens": 64}'

    The server listens at once and answers with status 503 until the model is loaded. As in OpenAI's API, a request
    without a temperature is sampled at 1.
    """
    missing = [name for name in PACKAGES if util.find_spec(name) is None]
    if missing:
        raise Failure(f"zinfer serve needs {', '.join(missing)}: pip install 'zinfer[serve]'", ENVIRONMENT)
    from zinfer.job.serve.dispatcher import Dispatcher, Settings
    from zinfer.job.serve.server import HttpServer, listen

    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise click.UsageError("the API key must be of printable ASCII characters, without a space at an end")
    job = options.prepared("serve", how)
    machine, tokenizer = options.this_machine(how["nvme_path"], how["gpu_memory"]), job.tokenizer
    choice = (how["nvme_path"], how["batch_size"], how["max_queue"])
    plan, load = typical_plan(job.cases(), job.source.spec, machine, *choice)
    if load is None:
        raise Failure(str(plan.why_not), ENVIRONMENT)
    names = ("batch_size", "max_queue", "max_body", "output_len", "drain_s", "kv_cache_size")
    first, *more = how["served_names"] or dict.fromkeys((served_name(how["model"]), how["model"]))
    settings = Settings(first, api_key, *(how[name] for name in names))._replace(
        aliases=tuple(more), form=form_of(tokenizer.facts)
    )
    try:
        bound = listen(host, port)
    except OSError as error:
        raise Failure(f"--host {host} --port {port}: {error.strerror or error}", ENVIRONMENT) from None
    with bound, Watch() as watch:
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
        if api_key is None and not host.startswith(LOOPBACK):
            watch.message(f"Warning: anybody who reaches {host} may use this server: set --api-key, or {KEY}")
        make_worker = watch.workers(job.target, how["timeout_s"], debug, job.source.revision)

        def ready() -> None:
            watch.quiet()
            watch.message(f"serving {settings.model} at {address}/v1")

        log = None if quiet else partial(click.echo, err=True)
        dispatcher = Dispatcher(
            plan, make_worker, load, settings, tokenizer, on_message=watch.message, on_ready=ready,
            on_loading=lambda: watch.loading(plan),
        )  # fmt: skip
        server = HttpServer(dispatcher, bound, log)
        watch.message(f"listening at {address}")
        fault = server.run()
        if server.signal is not None:
            watch.message("the server has ended")
            raise SystemExit(128 + server.signal)
        if fault is not None:
            raise Failure(fault, server.dispatcher.exit_code)
