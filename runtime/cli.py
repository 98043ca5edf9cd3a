"""The `runtime` command.

Owns its arguments and the printing of results. Refuses to compute: each command calls one function and shows
what it returns. torch is imported inside the commands that need it, so that the others work without it.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megakernel.assets import locate
from megakernel.config import ConfigError, pretty_json, write_text_atomic
from megakernel.families import SUPPORTED_FAMILIES, read_model
from megakernel.header import render
from runtime.report import model_table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Execute task tables.")


@app.callback()
def runtime() -> None:
    """Execute task tables and show what they run."""


@app.command()
def model(
    config: Annotated[
        str,
        typer.Argument(help=f"A Hugging Face config.json ({', '.join(SUPPORTED_FAMILIES)}), or its directory."),
    ],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the model as JSON.")] = False,
) -> None:
    """Show how a model's config is understood: block, layers, router, parameters and bytes."""
    spec = read_model(locate(config))
    if json:
        sys.stdout.write(pretty_json(spec))
    else:
        Console().print(model_table(spec))


@app.command()
def abi(
    header: Annotated[str, typer.Argument(help="The generated header.")] = "csrc/abi.cuh",
    *,
    write: Annotated[bool, typer.Option("--write", help="Write it instead of comparing.")] = False,
) -> None:
    """Check that the device header says what the host packs, or write it anew."""
    path = Path(header)
    if write:
        write_text_atomic(path, render())
    elif not path.is_file() or path.read_text(encoding="utf-8") != render():
        raise ConfigError(f"{path}: differs from what this program packs; run `runtime abi {path} --write`")


def main() -> None:
    """Run the command; bad input becomes one message and exit code 2."""
    try:
        app()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
