"""Verbs and exit codes.

Data goes to stdout, progress to stderr. Exit codes: 0 fine; 1 the answer is no; 2 bad input or usage; 3 this machine
cannot tell.
"""

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from dsparkgen import report, tree
from dsparkgen.locate import InvalidFile
from dsparkgen.render import TemplateError

NO, BAD_INPUT, CANNOT_TELL = 1, 2, 3

app = typer.Typer(
    help="Generates specialised draft-sampling kernels from model specs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
progress = Console(stderr=True)

Models = Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models; default: all.")]
Root = Annotated[Path | None, typer.Option(help="The folder with specs/ and templates/; default: the nearest parent.")]
Specs = Annotated[Path | None, typer.Option(help="Folder of private specs, instead of specs/.")]
Out = Annotated[Path | None, typer.Option(help="Source root to generate into, instead of generated/.")]


@app.callback()
def _top() -> None:
    """Generates specialised draft-sampling kernels from model specs."""


def main() -> None:
    """Entry point of the `dsparkgen` script."""
    app(prog_name="dsparkgen")


def _guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """Bad input ends a verb with exit code 2 and its message, never with a traceback."""

    @wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            verb(*args, **kwargs)
        except InvalidFile as error:
            report.problems(error.problems)
            raise typer.Exit(BAD_INPUT) from None
        except (TemplateError, tree.FormatterError, tree.NoRoot) as error:
            _fail(str(error), BAD_INPUT)

    return run


def _fail(message: str, code: int) -> NoReturn:
    print(f"dsparkgen: {message}", file=sys.stderr)
    raise typer.Exit(code)


@app.command()
@_guarded
def generate(models: Models = None, root: Root = None, specs: Specs = None, out: Out = None) -> None:
    """Render the kernels, write what changed, delete what no spec asks for."""
    roots = tree.find_roots(root, specs, out)
    built = tree.build_tree(roots, only=models or ())
    report.written(tree.write(built, roots), built, roots)
