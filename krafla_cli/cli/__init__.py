"""The command line: one module per subcommand, imported only when it is called. Parses, calls the library, prints."""

from __future__ import annotations

import importlib
import sys

import click

from krafla_cli.errors import EXIT_FAILURE, EXIT_INTERRUPTED, MlbError, os_reason

# name -> (module, one-line help). The help is here so that `mlb --help` imports none of the modules.
COMMANDS: dict[str, tuple[str, str]] = {
    "convert": ("convert", "Hugging Face checkpoint -> .mlb model"),
    "tokenizer": ("tokenizer", "tokenizer.json -> .mlt; look at tokens"),
    "run": ("run", "Generate text with a .mlb model"),
    "eval": ("eval", "Perplexity, and divergence from a baseline"),
    "export": ("export", ".mlb model -> GGUF, safetensors or MLLM"),
    "inspect": ("inspect", "Show what is in a file"),
    "validate": ("validate", "Check files; exit code 1 if any is bad"),
    "pack-embed": ("pack_embed", "Trained student -> LEMB embedding model"),
    "embed": ("embed", "Embed texts with a LEMB model"),
    "index": ("index", "Index a corpus with a LEMB model, and search it"),
    "diff": ("diff", "What differs between two files of one kind, and how much"),
    "imatrix": ("imatrix", "Add up importance matrices; see which channels matter"),
    "fingerprint": ("fingerprint", "Mark customers' copies of a LEMB model, and find whose one is"),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used; a wrong name suggests the near one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"krafla_cli.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command of ``args``; for a wrong name, the error names the nearest one."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _version() -> str:
    from importlib.metadata import version

    return version("krafla-cli")


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"mlb {_version()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print it.")
def cli() -> None:
    """Converters and runners for compact model files.

    \b
    mlb convert ./Qwen3-0.6B --wtype q4    a Hugging Face folder -> Qwen3-0.6B-q4.mlb
    mlb run Qwen3-0.6B-q4.mlb -p "hi"      generate text on the CPU
    """


def main(args: list[str] | None = None) -> None:
    """Runs the command line and ends the process with the exit code of the README's table."""
    sys.exit(invoke(sys.argv[1:] if args is None else args))


def invoke(args: list[str]) -> int:
    """Runs the command line; returns the exit code. Expected failures become one line on stderr.

    Not called ``run``: the module of that subcommand takes the name in this package once it is imported.
    """
    try:
        result = cli.main(args=args, prog_name="mlb", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Abort:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except click.ClickException as error:
        return _usage_failure(error)
    except MlbError as error:
        if "--debug" in args:
            raise
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; nothing is left to tell anyone.
        sys.stdout = None
        return EXIT_FAILURE
    except OSError as error:
        if "--debug" in args:
            raise
        name = f"{error.filename}: " if error.filename else ""
        return _fail(f"{name}{os_reason(error)}", EXIT_FAILURE)
    except MemoryError:
        return _fail("out of memory", EXIT_FAILURE)


def _fail(message: str, code: int) -> int:
    from krafla_cli.formats.text import printable

    one_line = printable(" ".join(message.split()), max_chars=4000)
    click.echo(f"mlb: error: {one_line}", err=True)
    return code


def _usage_failure(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return error.exit_code
    hint = ""
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f" (see '{error.ctx.command_path} --help')"
    return _fail(error.format_message() + hint, error.exit_code)
