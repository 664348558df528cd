"""The command `dlrm`: its help, its suggestions for misspelt commands, and the commands behind it."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.runtime import dlrm
from pipeline.config.files import ROOT


def test_every_command_has_a_purpose() -> None:
    files = {path.stem for path in Path(ROOT / "flows").glob("*.py")}
    assert sorted(dlrm.commands()) == sorted(files - {"__init__"})


def test_the_overview_names_each_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    dlrm.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in dlrm.commands():
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1


@pytest.mark.parametrize("name", dlrm.commands())
def test_help_says_what_a_command_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    dlrm.main([name.replace("_", "-"), "--help"])
    assert capsys.readouterr().out.startswith(f"usage: dlrm {name}")


def test_help_shows_parameters_with_defaults_and_meanings() -> None:
    text = dlrm.describe("train")
    assert "  force=False" in text
    assert "force: Trains even if the same training is in the registry." in text
    assert "training.epochs=2" in text


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trian", "error: 'trian' is no command. Did you mean 'train'?"),
        ("xyz", "error: 'xyz' is no command. dlrm --help lists the commands."),
    ],
)
def test_a_misspelt_command_gets_a_suggestion(word: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        dlrm.main([word])
    assert ended.value.code == said


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("dlrm ro", ["rollback "]),
        ("dlrm train ", []),
        ("dlrm train configs/demo.yaml forc", ["force="]),
        ("dlrm train configs/demo.yaml training.keep", ["training.keep_checkpoints="]),
        ("dlrm train configs/demo.yaml seed=3 evaluation.gr", ["evaluation.group_by="]),
        ("dlrm nonsense configs/demo.yaml tr", []),
    ],
)
def test_completion(line: str, offered: list[str]) -> None:
    assert dlrm.complete(line) == offered


def test_many_keys_are_offered_by_section() -> None:
    offered = dlrm.complete("dlrm train configs/demo.yaml ")
    assert {"force=", "seed=", "training.", "model."} <= set(offered)
    assert len(offered) <= dlrm.MOST_OFFERED


def test_the_shell_asks_the_command(tmp_path: Path) -> None:
    """As bash does after the line of `dlrm completion`."""
    program = tmp_path / "dlrm"
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m flows.runtime.dlrm "$@"\n')
    program.chmod(0o755)
    script = f"""
PATH={tmp_path}:$PATH
eval "$(dlrm completion)"
complete -p dlrm
COMP_LINE="dlrm back" COMP_POINT=9 dlrm --complete dlrm back dlrm
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "complete -o default -o nospace -C 'dlrm --complete' dlrm",
        "backfill ",
        "backtest ",
    ]


@pytest.mark.parametrize("module", ["flows.runtime.dlrm train", "flows.train"])
def test_a_reader_who_stops_listening_gets_no_traceback(module: str) -> None:
    command = f"{sys.executable} -m {module} --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout.startswith("usage: dlrm train"), done.stderr) == (True, "")


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from flows.runtime.dlrm import main; main(['--help']); main(['train', '--help']);"
    code += " print({'torch', 'mlflow', 'prefect', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_command_runs_as_its_module_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.runtime.dlrm", "train", "nothing.yaml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "config 'nothing.yaml': expected a readable YAML file" in done.stderr
