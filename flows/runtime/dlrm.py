"""The command `dlrm`: lists the commands, shows one's parameters, and runs it as `python -m flows.NAME` does.

Help reads the flow files as text, so that it answers before anything heavy is imported.
"""

import ast
import difflib
import importlib.metadata
import os
import runpy
import sys
from pathlib import Path

FLOWS = Path(__file__).resolve().parents[1]
PURPOSES = {
    "Data": ("dataset", "ingest", "enrich", "backfill", "features", "layout", "suggest"),
    "Train": ("train", "end_to_end", "recurring", "checkpoint", "preprocess"),
    "Models": ("serve", "score", "consistency", "report", "promote", "rollback", "register", "replay"),
    "Search and compare": ("sweep", "release", "backtest", "sharding", "characterize", "estimate"),
    "Operate": ("clean", "deploy", "doctor", "examples", "ui", "reference"),
}
"""Commands by what they are for."""
MOST_USED = (
    ("training.epochs=2", "passes over the training rows"),
    ("training.batch_rows=4096", "rows of a global batch"),
    ("training.world_size=2", "ranks"),
    ("preprocessing.workers=2", "preprocessing workers"),
    ("seed=3", "initial weights, order of rows, dropout"),
    ("home=/data/runs", "folder for everything that a run writes"),
)
COMPLETION = """# bash and zsh: eval "$(dlrm completion)"
[ -z "${ZSH_VERSION-}" ] || { autoload -U +X bashcompinit && bashcompinit; }
complete -o default -o nospace -C 'dlrm --complete' dlrm"""
"""Shell code that makes the shell ask `dlrm --complete`."""
MOST_OFFERED = 60
"""More keys than these are offered by section first."""
USAGE = "usage: dlrm COMMAND CONFIG.yaml [key=value ...] [--debug] [--json]"


def main(words: list[str] | None = None) -> None:
    """Runs one command; ends the process with its exit code."""
    given = sys.argv[1:] if words is None else words
    if not given or given[0] in ("-h", "--help", "help"):
        say(overview())
        return
    if given[0] in ("-V", "--version"):
        say(importlib.metadata.version("dlrm-pipeline"))
        return
    if given[0] == "completion":
        say(COMPLETION)
        return
    if given[0] == "--complete":  # by the shell, with the line so far in COMP_LINE
        say("\n".join(complete(os.environ.get("COMP_LINE", ""))))
        return
    name = given[0].replace("-", "_")
    if name not in commands():
        close = difflib.get_close_matches(name, commands(), n=1)
        hint = f"Did you mean '{close[0]}'?" if close else "dlrm --help lists the commands."
        sys.exit(f"error: '{given[0]}' is no command. {hint}")
    if {"-h", "--help"} & set(given[1:]):
        say(describe(name))
        return
    sys.argv = [f"dlrm {given[0]}", *given[1:]]
    runpy.run_module(f"flows.{name}", run_name="__main__", alter_sys=True)


def say(text: str) -> None:
    """Prints text to a reader who may stop listening, such as `head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complete(line: str) -> list[str]:
    """Returns how the last word of a command line may go on. For a config file, nothing: the shell completes files.

    Example:
        >>> complete("dlrm rec"), complete("dlrm train configs/demo.yaml training.epo")
        (['recurring '], ['training.epochs='])
    """
    *before, word = line.split(" ")
    before = [one for one in before if one]
    if len(before) < 2:
        return [f"{name} " for name in commands() if name.startswith(word)]
    name = before[1].replace("-", "_")
    if len(before) == 2 or name not in commands():
        return []
    from pipeline.config.keys import list_keys
    from pipeline.config.run import RunConfig
    from pipeline.study.points.load import StudyConfig

    model = StudyConfig if name in ("characterize", "estimate") else RunConfig
    parameters = [key for key in parameters_of(name) if key not in ("config", "overrides")]
    fitting = [f"{key}=" for key in (*parameters, *list_keys(model)) if key.startswith(word)]
    depth = len(word.split("."))
    sections = dict.fromkeys(".".join(key.split(".")[:depth]) + "." for key in fitting if key.count(".") >= depth)
    return fitting if len(fitting) <= MOST_OFFERED else [*(key for key in fitting if key.count(".") < depth), *sections]


def commands() -> list[str]:
    """All commands, by purpose."""
    return [name for names in PURPOSES.values() for name in names]


def overview() -> str:
    """The commands by purpose, a line each.

    Example:
        >>> print(overview().splitlines()[0])
        usage: dlrm COMMAND CONFIG.yaml [key=value ...] [--debug] [--json]
    """
    lines = [USAGE]
    for purpose, names in PURPOSES.items():
        lines += ["", f"{purpose}:"]
        lines += [f"  {name:<14} {_summary(_module(name))}" for name in names]
    more = "dlrm COMMAND --help shows its parameters; dlrm --version the version."
    return "\n".join([*lines, "", more, 'Completion of commands and keys: eval "$(dlrm completion)".'])


def describe(name: str) -> str:
    """One command: what it does, its parameters with their meanings, and the most used keys of a config."""
    module = _module(name)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        return f"usage: dlrm {name}\n\n{ast.get_docstring(module) or ''}"
    flow = functions[name]
    lines = [f"usage: dlrm {name} CONFIG.yaml [parameter=value ...] [key=value ...]", "", ast.get_docstring(flow) or ""]
    arguments = [argument.arg for argument in flow.args.args]
    defaults = [ast.unparse(default) for default in flow.args.defaults]
    given = dict(zip(arguments[-len(defaults) :], defaults, strict=True)) if defaults else {}
    own = [f"  {key}={given.get(key, '...')}" for key in arguments if key not in ("config", "overrides")]
    lines += ["", "Parameters and their defaults:", *(own or ["  none"])]
    lines += ["", "Most used keys of the config:", *(f"  {key:<26} {meaning}" for key, meaning in MOST_USED)]
    return "\n".join(lines)


def parameters_of(name: str) -> list[str]:
    """Returns the names of a flow's parameters. A command that is no flow has none.

    Example:
        >>> parameters_of("rollback")
        ['config', 'overrides']
    """
    module = _module(name)
    flows = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [argument.arg for flow in flows for argument in flow.args.args]


def _module(name: str) -> ast.Module:
    return ast.parse((FLOWS / f"{name}.py").read_text(encoding="utf-8"))


def _summary(module: ast.Module) -> str:
    return (ast.get_docstring(module) or "").splitlines()[0].removeprefix("Flow: ")


if __name__ == "__main__":
    main()
