"""A verb: options in groups, limits of their values, and the options of engines."""

import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import click

from zinfer.core.engine import ENGINES, ServerOptions, option_text, values
from zinfer.core.errors import USAGE, did_you_mean
from zinfer.engine.server import preset

# groups of options in the order of help, by the names of their parameters
GROUPS = {
    "Model": "model weights copies dtype allow_nan load_format layers chat_template chat_template_kwargs",
    "Workload": "prompts prompt_file requests request_lengths input_len output_len samples length contexts new_tokens "
    "num_requests batch_size in_flight request_rate request_order levels sla repeats rounds minutes "
    "chat system ignore_eos",
    "Sampling": "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty logit_bias "
    "stop_token_ids min_tokens seed structured_outputs",
    "Placement": "machine host_memory engine offload gpu_weights gpu_memory nvme_path weight_codec kv_offload "
    "kv_cache_dtype kv_cache_size draft acceptance experts gpus settings help_engine",
    "Server": "serve served_names host port api_key max_queue max_body drain_s",
    "Decision": "objective gpu_hour_usd stated demand deadline utilisation spare calibrate",
    "Many machines": "shard merge cluster slurm_args ray",
    "Output": "output form forms metric across as_json listed dry_run resume force yes quiet",
}
OTHER = "Other"  # and groups of a single option
NAMES = 22  # columns of names beside their texts; a longer name has a line of its own
WHOLE = 10**9  # largest count: tokens, rows, layers, repeats
SEED = 2**63  # largest seed: 64 bits
REAL = 1e12  # largest real number: seconds, prices
SMALLEST = 1e-9  # smallest one but 0: a quotient of two numbers is finite
TEXT = 1 << 20  # longest text, in characters: a prompt
NAME = 4096  # longest name or path: Linux's limit of a path
ITEMS = 1000  # maximum of values of a comma list
PROSE = ("prompts", "system")  # parameters with texts of any kind
_GROUP_OF = {name: title for title, names in GROUPS.items() for name in names.split()}


class Failure(click.ClickException):
    """Error of a command: a short message that says what to do next, and an exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]


class Verb(click.Command):
    """Command whose values have limits; its help groups the options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if any("\0" in word for word in args):
            raise click.UsageError("a NUL character", ctx)
        rest = super().parse_args(ctx, args)
        for param in self.params if not ctx.resilient_parsing else ():
            value, integer = ctx.params.get(str(param.name)), getattr(param.type, "largest", WHOLE)
            limits = SEED if param.name == "seed" else integer, TEXT if param.name in PROSE else NAME
            uses = value if isinstance(value, tuple | list) and (param.multiple or param.nargs != 1) else (value,)
            if fault := next(filter(None, (_fault(use, *limits) for use in uses)), ""):
                raise click.BadParameter(fault, ctx, param)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = defaultdict(list)
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        counts = Counter(_GROUP_OF.get(str(option.name)) for option in options)
        for option in options:
            title = _GROUP_OF.get(str(option.name))
            rows[title if title and counts[title] > 1 else OTHER].append(option.get_help_record(ctx))
        for title in (*GROUPS, OTHER):
            if found := [row for row in rows[title] if row is not None]:
                with formatter.section(title if len(rows) > 1 else "Options"):
                    formatter.write_dl(found, col_max=NAMES)


def _fault(value: Any, largest: int, longest: int) -> str:
    """Return the reason why a value is out of bounds; empty if it is not."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        if len(value) > ITEMS:
            return f"{len(value):,} values: at most {ITEMS:,}"
        return next(filter(None, (_fault(item, largest, longest) for item in value)), "")
    if isinstance(value, str | Path) and len(str(value)) > longest:
        return f"{len(str(value)):,} characters: at most {longest:,}"
    if isinstance(value, int) and abs(value) > largest:
        return f"{str(value)[:60]}: write a whole number up to {largest:,}"
    if isinstance(value, float) and not (math.isfinite(value) and abs(value) <= REAL):
        return f"{value}: write a number up to {REAL:,.0f}"
    if isinstance(value, float) and 0 < abs(value) < SMALLEST:
        return f"{value}: write 0, or a number from {SMALLEST} on"
    return ""


def help_engine(ctx: click.Context, param: click.Parameter, name: str | None) -> None:
    """Print the options of engine `name`, and end. Raises BadParameter for no engine."""
    if name is None or ctx.resilient_parsing:
        return
    if name not in (names := (*ENGINES, *preset.presets())):
        text = f"no engine {name[:60]!r}{did_you_mean(name, names)}; there are {', '.join(names)}"
        raise click.BadParameter(text, ctx, param)
    fields = (ENGINES[name].options if name in ENGINES else ServerOptions).model_fields.items()
    rows = [
        (f"{key}={'|'.join(values(field))}", f"{field.description}  [default: {option_text(field.default)}]")
        for key, field in fields
    ]
    formatter = ctx.make_formatter()
    with formatter.section(f"Options of engine {name}, as -O KEY=VALUE"):
        formatter.write_dl(rows)
    click.echo(formatter.getvalue(), nl=False)
    ctx.exit()
