"""`zinfer completion`: shell completion, and the words that it offers for values."""

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL, for verbs, options and their values: models, machines, engines, recipes.

    \b
    echo 'eval "$(zinfer completion bash)"' >> ~/.bashrc
    echo 'eval "$(zinfer completion zsh)"' >> ~/.zshrc
    zinfer completion fish > ~/.config/fish/completions/zinfer.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root().command
    # `source` of bash asks for bash's version first, which is of no use where the script is only printed.
    script = kind(root, {}, "zinfer", "_ZINFER_COMPLETE")
    click.echo(script.source_template % script.source_vars())


def _models() -> Iterable[str]:
    from zinfer.spec.resolve import catalogue_names

    return catalogue_names()


def _machines() -> Iterable[str]:
    from zinfer.spec.machine import catalogue_names

    return catalogue_names()


def _engines() -> Iterable[str]:
    from zinfer.job.recipe import engine_recipes
    from zinfer.spec.engine import ENGINES

    return [*ENGINES, *(path.stem for path in engine_recipes())]


def _recipes() -> Iterable[str]:
    from zinfer.job.recipe import sweep_recipes

    return [path.stem for path in sweep_recipes()]


def _settings() -> Iterable[str]:
    from zinfer.spec.engine import ENGINES, values

    fields = {key: field for kind in ENGINES.values() for key, field in kind.options.model_fields.items()}
    return [f"{key}={value}" for key, field in fields.items() for value in values(field)]


# parameter -> its known values; a path may stand in the place of a model, a machine or a recipe
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "model": _models, "machine": _machines, "engine": _engines, "recipe": _recipes, "settings": _settings,
}  # fmt: skip
METAVARS = {"model": "MODEL", "machine": "MACHINE", "engine": "ENGINE"}


def add_values(verb: click.Command) -> None:
    """Let the parameters of `verb` that stand for models, machines, engines, recipes and options of engines complete
    their values, also behind a comma, and name them so in its help."""
    for param in verb.params:
        if param.name in VALUES:
            setattr(param, "shell_complete", _completer(VALUES[param.name], param))  # noqa: B010 - a method
            if isinstance(param, click.Option) and param.metavar is None and param.name in METAVARS:
                several = ",.." if param.type.name == "a,b,.." else ""
                param.metavar = METAVARS[param.name] + several


def _completer(values: Callable[[], Iterable[str]], param: click.Parameter) -> Callable[..., list[CompletionItem]]:
    lists = param.type.name == "a,b,.."

    def complete(_ctx: click.Context, incomplete: str, *_more: Any) -> list[CompletionItem]:
        before, comma, begun = incomplete.rpartition(",") if lists else ("", "", incomplete)
        found = [CompletionItem(before + comma + value) for value in values() if value.startswith(begun)]
        if not comma and param.name in ("model", "machine", "recipe"):
            kind = "dir" if param.name == "model" else "file"
            found += [CompletionItem(incomplete, type=kind)] * ("/" in incomplete or incomplete.startswith("."))
        return found

    return complete
