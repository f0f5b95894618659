"""`sluice`: one command line for the daemon, its clients and its tools.

Only registers commands; each lives in its own module and imports what is heavy when it runs. Turns every
error into one line (or one JSON object, with --json) and the exit code of its kind.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import typer

from sluice.daemon.client.ask import ask
from sluice.daemon.client.chat import chat
from sluice.daemon.client.status import status
from sluice.daemon.run import run
from sluice.daemon.serve import serve
from sluice.io.errors import SluiceError
from sluice.tools.bench import bench
from sluice.tools.diskbench import diskbench
from sluice.tools.doctor import doctor
from sluice.tools.download import download
from sluice.tools.install_service import install_service
from sluice.tools.mini import synth
from sluice.tools.pack import pack
from sluice.tools.plan import plan
from sluice.tools.presets_cmd import config, presets_app
from sluice.tools.trace_cmd import trace

USAGE_ERRORS: Any = typer.BadParameter.__mro__[1:3]
"""What the parser raises for a wrong command line. Typer names only BadParameter in public; these are its bases,
whichever click it stands on."""

app = typer.Typer(
    name="sluice",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Answers prompts with mixture-of-experts models far larger than memory.",
)
for command in (
    serve,
    run,
    ask,
    chat,
    status,
    plan,
    config,
    synth,
    pack,
    bench,
    diskbench,
    install_service,
    doctor,
    download,
    trace,
):
    app.command()(command)
app.add_typer(presets_app, name="presets")


@app.command()
def version() -> None:
    """Print the version."""
    import sluice

    print(sluice.__version__)


def main() -> None:
    """The console script. Exit codes: 0 fine, 2 usage or configuration, 3 the plan does not fit, 4 model data,
    5 daemon unreachable, 6 instance held, 130 interrupted, 1 a bug."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command line; the exit code. Never raises but for bugs in itself."""
    as_json = "--json" in arguments
    try:
        code = app(arguments, standalone_mode=False)
    except typer.Abort:
        return 130
    except USAGE_ERRORS as error:
        if not error.format_message():  # no arguments at all: the help was printed, and that is the answer
            return 2
        return _fail(error.format_message(), "usage", 2, as_json)
    except SluiceError as error:
        return _fail(str(error), type(error).__name__, error.exit_code, as_json)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read us has gone; say no more
        return 0
    except Exception as bug:
        if os.environ.get("SLUICE_TRACEBACK"):
            traceback.print_exc()
        return _fail(f"{type(bug).__name__}: {bug} (a bug; SLUICE_TRACEBACK=1 shows where)", "bug", 1, as_json)
    return code if isinstance(code, int) else 0


def _fail(message: str, kind: str, code: int, as_json: bool) -> int:
    message = " ".join(message.split())
    if as_json:
        print(json.dumps({"error": {"type": kind, "message": message, "exit_code": code}}, ensure_ascii=False))
    else:
        print(f"sluice: {message}", file=sys.stderr)
    return code
