"""The commands, configs, code and links in README and docs/ work as written."""

import inspect
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from prefect import Flow

from flows import dataset, deploy, serve
from flows.deployments.deployment import parse_schedule
from flows.deployments.setup import Settings
from flows.deployments.setup import parse as parse_options
from flows.features import Action
from flows.reference import commands
from flows.runtime.cli import parse
from pipeline.config import RunConfig, load
from pipeline.config.files import parse_yaml
from pipeline.jobs.notify import NotifyConfig
from pipeline.study.points.load import load_study

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES = [*TOP, *sorted(DOCS.rglob("*.md"))]
MEASURED = {DOCS / "efficiency" / f"e{number}.md" for number in range(1, 9)}
"""Written by `flows.characterize`."""
GENERATED = {DOCS / "reference" / "commands.md", *(DOCS / "reference" / "config").glob("*.md")}
OTHER_PROGRAMS = {".venv/bin/ray", ".venv/bin/torchrun", "source", "export", "createdb", "curl"}
OTHER_YAML = {"job_variables"}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
OWN_DATA = "configs/mine.yaml"
"""The reader's own config: the first YAML block of docs/data.md."""


ELSEWHERE = {
    OWN_DATA, "data/criteo10k", "data/NAME", "flows/NAME.py", "pipeline/x/y.py", "tests/pipeline/x/test_y.py",
}  # fmt: skip
"""Files that belong to the reader, and patterns of names."""


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(path), re.DOTALL | re.MULTILINE)


def all_blocks(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}")
        for path in PAGES
        for number, block in enumerate(blocks(path, language))
    ]


def commands_in(block: str) -> Iterator[list[str]]:
    """Returns the words of each command in a shell block. A command may span several lines."""
    text = ""
    for line in block.replace("\\\n", " ").splitlines():
        text += line + "\n"
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quote is still open
            continue
        text = ""
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield words


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("configs") / "mine.yaml"
    path.write_text(blocks(DOCS / "data.md", "yaml")[0], encoding="utf-8")
    return path


@pytest.mark.parametrize("block", all_blocks("sh"))
def test_commands_are_valid(block: str, own_data: Path) -> None:
    for words in commands_in(block):
        check(words, own_data)


def check(words: list[str], own_data: Path) -> None:
    program, *rest = words
    if program in ("python", ".venv/bin/python") and rest[0] == "-m":
        module = rest[1].removeprefix("flows.")
        if module == "pytest":
            assert all((ROOT / word).exists() for word in rest[2:] if not word.startswith("-")), words
        else:
            check_command(module, rest[2:], own_data)
    elif program == "python" and rest[0] == "-c":
        compile(rest[1], "a page", "exec")
    elif program == "dlrm":
        if rest != ["--help"]:
            check_command(rest[0], rest[1:], own_data)
    elif program == "make":
        targets = [word for word in rest if "=" not in word]
        assert all(re.search(rf"^{target}:.*##", MAKEFILE, re.MULTILINE) for target in targets), words
        assert all(f"$({word.split('=')[0]})" in MAKEFILE or word.startswith("CHAIN") for word in rest if "=" in word)
    elif program == ".venv/bin/prefect":
        if rest[:2] == ["deployment", "run"]:
            assert rest[2] in declared()
    else:
        assert program in OTHER_PROGRAMS, f"{program}: a test should check this command"


def check_command(name: str, words: Sequence[str], own_data: Path) -> None:
    """Checks that flow, parameters, keys and config exist and fit. Runs nothing."""
    command = commands()[name]
    if isinstance(command, types.ModuleType):
        if command is dataset:
            dataset.find_set(dataset.parse(words)[0] or "criteo")
        if command is deploy:
            check_deploy(words)
        if command is serve:
            serve.read_options(words[1:])
        return
    named = [word for word in words if "=" not in word]
    assert len(named) == (0 if name == "suggest" and "=" in words[0] else 1), words
    overrides, _ = parse(words[len(named) :], list(inspect.signature(command.fn).parameters))
    if not named or named[0].startswith(".dlrm/"):  # an earlier command writes it
        return
    read = load_study if name in ("characterize", "estimate") else load
    config = read(own_data if named[0] == OWN_DATA else ROOT / named[0], overrides)
    assert config.name


def check_deploy(words: Sequence[str]) -> None:
    """Checks actions and options of `dlrm deploy`."""
    if words and words[0] == "setup":
        parse_options(words[1:], Settings)
    elif words and words[0] not in ("list", "remove"):
        assert words[0].endswith(".yaml")
        options = parse_options(words[1:], deploy.Options)
        assert options.cron is None or parse_schedule(options.cron, options.timezone)


@pytest.mark.parametrize("block", all_blocks("yaml"))
def test_configs_are_valid(block: str, own_data: Path, tmp_path: Path) -> None:
    values = parse_yaml(block)
    if values.keys() & OTHER_YAML:
        return
    if "addresses" in values:
        NotifyConfig.model_validate(values)
        return
    assert values.keys() <= RunConfig.model_fields.keys()
    if "name" not in values:
        values["base"] = str(own_data if "source" in values else ROOT / "configs" / "smoke.yaml")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    load(tmp_path / "run.yaml")


@pytest.mark.parametrize("block", all_blocks("python"))
def test_code_compiles(block: str) -> None:
    compile(block, "a page", "exec")


def test_the_config_for_own_data_is_the_one_described(own_data: Path) -> None:
    config = load(own_data)
    assert config.name == "mine"
    assert config.features.sparse[1].pooling == "mean"


@pytest.mark.usefixtures("smoke")
def test_the_example_of_serving_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        blocks(DOCS / "serving.md", "python")[0]
        .replace(".dlrm/", f"{home}/")
        .replace("models:/demo@", "models:/smoke@")
    )
    assert str(home) in code
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # the example sets it for the whole process
    exec(code, {})
    assert "probability" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("smoke")
def test_the_example_of_a_loop_of_ones_own_runs(home: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(blocks(DOCS / "own_loop.md", "python")[0], encoding="utf-8")
    done = subprocess.run([sys.executable, tmp_path / "loop.py"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "DLRM_HOME": str(home)})  # fmt: skip
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 2, done.stderr
    assert losses[1] < losses[0] < 0.7


def test_the_example_of_an_op_runs(tmp_path: Path) -> None:
    code = "\n".join(blocks(DOCS / "internals" / "add_an_op.md", "python"))
    code += "\ncounts = Counts()\nprint(SquareRoot().apply([Column(np.array([9.0, -1.0]))], counts).values, *counts)"
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, tmp_path / "example.py"], cwd=ROOT, capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT), "NUMBA_DISABLE_JIT": "1"})  # fmt: skip
    assert done.stdout.strip() == "[3. 0.] square_root value", done.stderr


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE))
    named = {name for path in PAGES for name in re.findall(r"`make ([a-z-]+)", text_of(path))}
    assert named <= targets, named - targets
    assert {"demo", "test", "test-slow", "test-all", "setup", "ui", "check", "help", "docs"} <= targets


def test_commands_and_files_named_exist() -> None:
    names = commands().keys() | {"runtime", "cli"}
    for path in PAGES:
        text = text_of(path)
        assert set(re.findall(r"\bflows\.([a-z_]+)", text)) <= names, path
        for name in re.findall(r"`((?:configs|benchmarks|tests|data)/[\w/.]+)`", text):
            assert (ROOT / name).exists() or name in ELSEWHERE, (path, name)


def test_links_that_leave_the_site_exist() -> None:
    for path in TOP:
        for name in re.findall(r"\]\((?!http)([\w./]+)(?:#[\w-]+)?\)", text_of(path)):
            assert (path.parent / name).exists(), (path, name)


def test_every_module_that_a_page_names_exists() -> None:
    for path in PAGES:
        for name in re.findall(r"`((?:flows|pipeline|storage|models)/[\w/]+\.py)`", text_of(path)):
            assert (ROOT / name).exists() or name in ELSEWHERE, (path, name)


def test_every_stop_of_the_walk_is_where_it_says() -> None:
    walk = text_of(DOCS / "internals" / "architecture.md").split("## A walk through the code")[1].split("\n## ")[0]
    stops = re.findall(r"^\d+\. `([\w/.]+)`(?:, `(\w+)`)?:", walk, re.MULTILINE)
    assert all(len(re.findall(r"^\d+\. ", part, re.MULTILINE)) <= 12 for part in walk.split("\n### ")[1:])
    assert len(stops) == len(re.findall(r"^\d+\. ", walk, re.MULTILINE))
    missing = [
        (path, name)
        for path, name in stops
        if not re.search(rf"(?:def|class) {name}\b|^name:", text_of(ROOT / path), re.MULTILINE)
    ]
    assert missing == []


def declared() -> set[str]:
    deployments = yaml.safe_load(text_of(ROOT / "prefect.yaml"))["deployments"]
    return {f"{one['entrypoint'].split('.')[-1].replace('_', '-')}/{one['name']}" for one in deployments}


def test_deployments_named_are_declared() -> None:
    flows = {name.split("/")[0] for name in declared()}
    for path in PAGES:
        for flow, name in re.findall(r"`([a-z-]+)/([a-z-]+|\*)`", text_of(path)):
            if flow in flows and name not in ("*", "mine"):  # the reader's own
                assert f"{flow}/{name}" in declared(), (path, flow, name)


def test_every_flow_runs_on_demand() -> None:
    flows = {name.replace("_", "-") for name, command in commands().items() if isinstance(command, Flow)}
    assert {f"{flow}/{flow}" for flow in flows} <= declared()


def test_pages_name_existing_actions() -> None:
    shown = re.findall(r"flows\.features \S+ action=(\w+)", text_of(DOCS / "features.md"))
    assert shown
    assert set(shown) <= set(get_args(Action))


def test_readme_is_short() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 150


@pytest.mark.parametrize(
    "path", [path for path in PAGES if path not in MEASURED | GENERATED], ids=lambda path: path.name
)
def test_lines_are_short(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in prose.splitlines() if len(line) > (120 if line.startswith("|") else 100)]
    assert long == []


def build_site(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds a site as `make docs` does."""
    pytest.importorskip("mkdocs")
    (words,) = re.findall(r"-m (mkdocs build.*)", MAKEFILE)
    words = [sys.executable, "-m", *shlex.split(words), "--config-file", str(config), "--site-dir", str(site)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    done = build_site(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    page = text_of(tmp_path / "site" / "index.html")
    assert "fonts.googleapis" not in page
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=\"https?:", page)


@pytest.mark.parametrize(
    ("link", "found"),
    [("index.md", None), ("nowhere.md", "nowhere.md"), ("index.md#nowhere", "nowhere"), ("/index.md", "absolute")],
)
def test_a_broken_link_fails_the_build_of_the_site(tmp_path: Path, link: str, found: str | None) -> None:
    settings = text_of(ROOT / "mkdocs.yml").partition("\nnav:\n")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md]\n", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n[A link]({link})\n", encoding="utf-8")
    done = build_site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert (done.returncode == 0) == (found is None), done.stderr
    assert found is None or found in done.stderr
