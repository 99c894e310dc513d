"""The `qkflow` command: runs a subcommand and prints bad input as one sentence.

Each subcommand is one typed function in `qkflow.cli.commands`; tyro derives its command line from the
signature and its help from the docstring. A module is imported only when its command runs, so
`qkflow --help` does not import torch.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from qkflow import files, streams
from qkflow.errors import InputError, unknown

# name on the command line -> (module under qkflow.cli.commands, function, one line of help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "compare": ("compare", "compare", "compare variants with standard attention on a corpus"),
    "report": ("report", "report", "rebuild the report of a study from its folder, or compare several"),
    "watch": ("watch", "watch", "the report of a study while it runs, in the browser"),
    "reproduce": ("reproduce", "reproduce", "list, plan or run the experiments of the papers"),
    "plan": ("plan", "plan", "memory, hours and cost of a comparison on given hardware, before it runs"),
    "plan devices": ("plan", "devices", "list the devices of the planner, with sources"),
    "plan scaling": ("plan", "scaling", "simulate a run and a study on 1 to 4,096 devices"),
    "claims": ("claims", "claims", "every claim of the papers beside what we measured"),
    "calibrate": (
        "calibrate",
        "calibrate_command",
        "error rates and power of the verdicts, by simulation",
    ),
    "train": ("train", "train", "train one model, or resume its training"),
    "eval": (
        "evaluate",
        "evaluate",
        "perplexity and bits per byte of a model, or its scores on tasks",
    ),
    "generate": ("generate", "generate", "generate text with a trained model"),
    "probe": ("probe", "probe", "measure and draw the attention of a trained model"),
    "explore": ("explore", "explore", "look into one or two models in the browser"),
    "bench": ("bench", "bench", "time and memory of each coupling and scoring beside standard attention"),
    "data list": ("data", "list_corpora", "list the built-in corpora"),
    "data describe": ("data", "describe", "statistics of a corpus: size, entropy, repetition"),
    "data prepare": ("data", "prepare", "tokenize a corpus into the cache"),
    "data verify": ("data", "verify", "check a prepared corpus against its checksums"),
    "couplings": ("registry", "couplings", "list the couplings: equation, properties, options"),
    "scorings": ("registry", "scorings", "list the scorings"),
    "inits": ("registry", "inits", "list the parameter inits"),
    "config": ("registry", "config", "list the keys of a run's config.yaml: type, default, description"),
    "pace flow": ("pace", "flow", "the reduced gradient flow of attention, in closed form"),
    "pace synthetic": (
        "pace",
        "synthetic",
        "train attention on the controlled task, beside the published figure",
    ),
    "pace groups": ("pace_groups", "groups", "list the parameters of the query-key circuit of a model"),
    "pace study": ("pace_study", "study", "measure the effect of faster query-key learning on a real task"),
    "timescale theory": ("timescale", "theory", "check the fast-slow limit: solvers, order in ε, learned φ"),
    "export": ("hf", "export", "convert a trained model to a transformers folder"),
    "import": ("hf", "import_model", "convert a transformers model to a qkflow folder"),
}

# Flags that were renamed: an old one is refused with the new one's name, unless the command still has it.
RENAMED_FLAGS = {
    "--starts": "--inits",
    "--start": "--init",
    "--qk-start": "--qk-init",
    "--ov-start": "--ov-init",
    "--length": "--seq-len",
    "--batch": "--batch-size",
    "--width": "--dim",
    "--heads": "--n-heads",
    "--kv-heads": "--n-kv-heads",
    "--layers": "--n-layers",
    "--hidden": "--hidden-dim",
}

HELP_FLAGS = ("-h", "--help", "help")
TOP_LEVEL_FLAGS = ["--help", "--version", "--no-color", "--print-completion"]


def usage(names: Collection[str] = COMMANDS) -> str:
    width = max(len(name) for name in names)
    rows = "\n".join(f"  {name:<{width}}  {COMMANDS[name][2]}" for name in names)
    return (
        "qkflow: the dynamics of attention.\n\n"
        f"usage: qkflow COMMAND [options]\n\ncommands:\n{rows}\n\n"
        "`qkflow COMMAND --help` shows a command's options and examples.\n"
        "`qkflow --version`; `qkflow --print-completion bash|zsh|fish` prints a script for tab completion.\n"
        "Every command takes --json and --no-color. Set QKFLOW_DEBUG=1 to see a traceback with an error."
    )


def subcommands(group: str) -> list[str]:
    """Return the commands of a group such as `data`."""
    return [name for name in COMMANDS if name.startswith(f"{group} ")]


def split_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Split the arguments into a command name of one or two words and the remaining arguments."""
    for words in (2, 1):
        name = " ".join(argv[:words])
        if len(argv) >= words and name in COMMANDS:
            return name, list(argv[words:])
    if group := subcommands(argv[0]):
        raise unknown("command", " ".join(argv[:2]), group)
    raise unknown("command", argv[0], COMMANDS)


def check_renamed_flags(argv: Sequence[str], command: Callable[..., object]) -> None:
    """Raise InputError if the arguments of a command contain the old name of one of its flags."""
    flags = {f"--{name.replace('_', '-')}" for name in inspect.signature(command).parameters}
    for argument in argv:
        old = argument.partition("=")[0].replace("_", "-")
        new = RENAMED_FLAGS.get(old)
        if new in flags and old not in flags:
            raise InputError(f"{old} was renamed: write {new}", code="renamed-flag")


def load_command(name: str) -> Callable[..., object]:
    """Import and return the function of a command."""
    module, function, _ = COMMANDS[name]
    command: Callable[..., object] = getattr(
        importlib.import_module(f"qkflow.cli.commands.{module}"), function
    )
    return command


def disable_color(argv: Sequence[str]) -> list[str]:
    """Return the arguments without --no-color. Where it or NO_COLOR is set, no command prints color."""
    rest = [argument for argument in argv if argument != "--no-color"]
    if len(rest) < len(argv):
        os.environ["NO_COLOR"] = "1"  # read by rich, and by the processes that a command starts
    if os.environ.get("NO_COLOR"):
        os.environ["PYTHON_TYRO_ANSI_CODES"] = "False"  # the help of tyro does not read NO_COLOR
    return rest


def _completion_script(argv: Sequence[str]) -> str:
    from qkflow.cli.completion import SHELLS, command_flags, completion_script

    shell = " ".join(argv).replace("=", " ").partition(" ")[2]
    if not shell:
        raise InputError(f"--print-completion needs a shell: {', '.join(SHELLS)}", code="shell-missing")
    if shell not in SHELLS:  # before every command is imported
        raise unknown("shell", shell, SHELLS)
    help_lines = {name: text for name, (_, _, text) in COMMANDS.items()}
    flags = {name: command_flags(load_command(name)) for name in COMMANDS}
    return completion_script(shell, help_lines, flags, TOP_LEVEL_FLAGS)


def dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in HELP_FLAGS:
        print(usage())
        return 0
    if argv[0] not in COMMANDS and subcommands(argv[0]) and argv[1:] and argv[1] in HELP_FLAGS:
        print(usage(subcommands(argv[0])))
        return 0
    if argv[0] in ("-V", "--version"):
        from qkflow import __version__

        print(f"qkflow {__version__}")
        return 0
    if argv[0].partition("=")[0] == "--print-completion":
        print(_completion_script(argv), end="")
        return 0
    name, rest = split_command(argv)
    import tyro

    from qkflow.cli.arguments import checked
    from qkflow.cli.help import annotate_for_tyro

    command = load_command(name)
    check_renamed_flags(rest, command)
    command = checked(annotate_for_tyro(command), rest)
    exit_code = tyro.cli(command, args=rest, prog=f"qkflow {name}", config=(tyro.conf.FlagCreatePairsOff,))
    return exit_code if isinstance(exit_code, int) else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python or PyTorch could not allocate memory."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)


def main() -> None:
    streams.configure_streams()
    # Transparent huge pages for large tensors on Linux: decoding reads weights about 10% faster
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        code = _dispatch_and_flush(disable_color(sys.argv[1:]))
    except InputError as error:
        code = _report(error, 2)
    except BrokenPipeError:  # the reader of stdout or stderr has closed it
        code = 141  # 128 + SIGPIPE
    except (MemoryError, RuntimeError) as error:
        if os.environ.get("QKFLOW_DEBUG") or not is_out_of_memory(error):
            raise
        size = re.search(r"tried to allocate [\w. ]+", str(error))
        message = f"not enough memory ({size[0] if size else 'of this machine'}): choose smaller sizes"
        code = _report(InputError(message, code="out-of-memory"), 2)
    except OSError as error:
        code = _report(_describe_os_error(error), 2)
    except KeyboardInterrupt:
        code = _report("qkflow: interrupted", 130)
    finally:
        streams.discard_unwritable()
    sys.exit(code)


def _dispatch_and_flush(argv: Sequence[str]) -> int:
    """Run a command. Raise OSError if its output cannot be written, instead of a warning at exit."""
    try:
        code = dispatch(argv)
    except SystemExit as error:  # of tyro: help, or wrong usage
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    sys.stdout.flush()
    return code


def _report(error: InputError | str, code: int) -> int:
    """Print an error as one line, with a traceback if QKFLOW_DEBUG is set. Return the exit code."""
    if isinstance(error, InputError) and os.environ.get("QKFLOW_DEBUG"):
        raise
    with suppress(OSError):  # stderr may be closed too
        print(error.to_line() if isinstance(error, InputError) else error, file=sys.stderr)
    return code


def _describe_os_error(error: OSError) -> InputError:
    name = error.filename2 or error.filename  # of a rename its target, not the temporary file
    path = f" ({name})" if name else ""
    if files.is_disk_full(error):
        remedy = "free some space, then run the same command again"
        return InputError(f"the disk is full{path}: {remedy}", code="disk-full")
    message = " ".join(str(error.strerror or error).split())
    denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    remedy = ": change its permissions, or use another folder" if denied else ""
    return InputError(f"{message}{path}{remedy}", code="os-error")
