"""Help of a verb: its options in groups, and those of an engine where they are asked for."""

from collections import Counter, defaultdict

import click

from zinfer.core.engine import ENGINES, ServerOptions, option_text, values
from zinfer.core.errors import did_you_mean
from zinfer.engine.server import preset

# groups of options in the order of help, by the names of their parameters
GROUPS = {
    "Model": "model weights copies dtype allow_nan load_format layers chat_template chat_template_kwargs",
    "Workload": "prompts prompt_file requests request_lengths input_len output_len samples length contexts new_tokens "
    "num_requests batch_size in_flight request_rate request_order levels sla repeats rounds minutes "
    "chat system ignore_eos",
    "Sampling": "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty logit_bias "
    "stop_token_ids min_tokens seed structured_outputs",
    "Placement": "machine host_memory engine offload gpu_weights nvme_path weight_codec kv_offload "
    "kv_cache_dtype kv_cache_size draft acceptance experts gpus settings help_engine",
    "Server": "serve served_names host port api_key max_queue max_body drain_s",
    "Decision": "objective gpu_hour_usd stated demand deadline utilisation spare calibrate",
    "Many machines": "shard merge cluster slurm_args ray",
    "Output": "output form forms wanted metric across as_json listed dry_run resume force yes quiet",
}
OTHER = "Other"  # and groups of a single option
_GROUP_OF = {name: title for title, names in GROUPS.items() for name in names.split()}


class Verb(click.Command):
    """Command whose help shows its options by group."""

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
                    formatter.write_dl(found)


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
