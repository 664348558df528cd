"""Arrows point down: every import of the product is parsed, and a stray one fails."""

import ast
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {"flows": {"flows", "pipeline", "storage", "models"}, "pipeline": {"pipeline", "storage", "models"}, "storage": {"storage"}, "models": {"models"}}  # fmt: skip
GROUND = {"errors", "process", "forkserver", "figure", "sealed", "data", "transforms"}
"""Modules and rooms of pipeline/ that all stages may import; none of them imports a stage."""
STAGES = {
    "catalog",
    "extraction",
    "suggestion",
    "preprocessing",
    "training",
    "evaluation",
    "registration",
    "scoring",
    "serving",
    "search",
    "characterization",
}
JOBS = {"jobs"}
"""The one room of pipeline/ that may import several stages."""
TOOLS = {"__init__", "dataset", "deploy", "doctor", "examples", "ui", "reference", "serve"}
"""Modules of flows/ that are no flows."""
ALIASES = {"compare": "backtest", "placement": "sharding", "size": "estimate"}
"""Former name of a flow -> its flow."""
STARTED = {
    "backfill": {"recurring"}, "backtest": {"ingest"}, "end_to_end": {"ingest", "train"}, "recurring": {"ingest", "train"},
}  # fmt: skip
"""Flow -> the flows that it starts."""
CONFIG_IMPORTS = ("pipeline.errors", "storage.config", "pydantic")
"""What the config of a stage may import, beside the standard library, its own room and `pipeline.data.columns`."""
HEAVY = {"torch", "torchrec", "mlflow", "numpy", "numba", "pyarrow", "pyiceberg", "duckdb", "optuna", "prefect"}
"""Libraries that reading a config must not import."""
ORCHESTRATION = {"prefect"}
"""Libraries that only flows/ may import."""


def imports() -> Iterator[tuple[Path, str]]:
    """(file, imported module) over the whole product."""
    for package in LAYERS:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    yield from ((path.relative_to(ROOT), alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{path}: relative import"
                    assert node.module is not None
                    names = (
                        [f"{node.module}.{alias.name}" for alias in node.names]
                        if node.module in LAYERS
                        else [node.module]
                    )
                    yield from ((path.relative_to(ROOT), name) for name in names)


def test_layers_import_downwards_only():
    stray = [
        f"{path} imports {name}"
        for path, name in imports()
        if name.split(".")[0] in LAYERS and name.split(".")[0] not in LAYERS[path.parts[0]]
    ]
    assert stray == []


def test_private_names_of_other_packages_are_used_in_one_place_each():
    """ruff's SLF finds `package._name`; this finds `from package import _name`, which it does not."""
    stray = []
    for package in LAYERS:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module and not path.stem.endswith("_private"):
                    names = [*node.module.split("."), *(alias.name for alias in node.names)]
                    stray += [f"{path} imports {name}" for name in names if name.startswith("_") and name[1] != "_"]
    assert stray == []


def test_stages_do_not_import_one_another():
    stray = []
    for path, name in imports():
        if path.parts[0] != "pipeline" or not name.startswith("pipeline."):
            continue
        importer, imported = path.with_suffix("").parts[1], name.split(".")[1]
        if importer in STAGES and imported not in GROUND | {importer}:
            stray.append(f"{path} imports {name}")
        if importer in GROUND and imported not in GROUND:
            stray.append(f"{path} imports {name}")
    assert stray == []


def test_every_module_of_the_pipeline_has_its_place():
    found = {
        path.stem if path.is_file() else path.name
        for path in (ROOT / "pipeline").iterdir()
        if not path.name.startswith("_")
    }
    assert found == GROUND | STAGES | JOBS | {"config"}


def test_only_flows_know_the_orchestrator():
    stray = [
        f"{path} imports {name}"
        for path, name in imports()
        if name.split(".")[0] in ORCHESTRATION and path.parts[0] != "flows"
    ]
    assert stray == []


def flow_files() -> list[Path]:
    return [path for path in sorted((ROOT / "flows").glob("*.py")) if path.stem not in TOOLS]


def test_a_flow_file_is_a_command_and_little_more():
    assert [path.name for path in flow_files() if len(path.read_text(encoding="utf-8").splitlines()) > 120] == []
    allowed = ("prefect", "pydantic", "flows", "pipeline.jobs", "pipeline.config", "pipeline.errors")
    names = {path.relative_to(ROOT) for path in flow_files()}
    stray = [
        f"{path} imports {name}"
        for path, name in imports()
        if path in names and name.split(".")[0] not in sys.stdlib_module_names and not name.startswith(allowed)
    ]
    assert stray == []


def test_every_file_of_flows_is_a_command_or_a_tool():
    """A file that calls no `command(` would succeed without doing anything: `python -m flows.NAME`."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in flow_files()}
    assert [name for name, code in found.items() if f'\n    command("{name}"' not in code] == []


def test_a_flow_imports_no_flow_but_those_it_starts():
    stray = []
    for path, name in imports():
        if path.parts[0] != "flows" or len(path.parts) > 2 or path.stem in TOOLS or not name.startswith("flows."):
            continue
        imported = name.split(".")[1]
        known = STARTED.get(path.stem, set()) | {ALIASES.get(path.stem)}
        if imported != "runtime" and imported not in known:
            stray.append(f"{path} imports {name}")
    assert stray == []


def test_the_config_of_a_stage_imports_little():
    stray = []
    for path, name in imports():
        if path.name != "config.py" or path.parts[0] == "flows" or name.split(".")[0] in sys.stdlib_module_names:
            continue
        room = ".".join(path.parts[:2])
        if not name.startswith((*CONFIG_IMPORTS, f"{room}.", "pipeline.data.columns")):
            stray.append(f"{path} imports {name}")
    assert stray == []


def test_configs_load_nothing_heavy():
    code = f"import sys, pipeline.config; print(sorted({HEAVY} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_first_lines_of_a_command_load_the_standard_library_only():
    """Prefect's server starts before pydantic is imported, which takes as long as all that comes before."""
    code = """
import sys
import flows.runtime.front
print(sorted({name.partition(".")[0] for name in sys.modules} & {"anyio", "pydantic", "yaml", "httpx", "psutil"}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_records_that_no_config_holds_do_without_docstrings_of_fields():
    """For each such class, pydantic searches all modules that are loaded: a tenth of a second beside Prefect."""
    found = [
        path
        for path in (ROOT / "storage").rglob("*.py")
        if path.name != "config.py" and "use_attribute_docstrings" in path.read_text(encoding="utf-8")
    ]
    assert found == []


def takes_a_whole_config(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a parameter is a RunConfig, or may be one."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    kinds = [ast.unparse(parameter.annotation).strip("'") for parameter in parameters if parameter.annotation]
    return any("RunConfig" in kind.split(" | ") for kind in kinds)


def test_few_functions_take_a_whole_config():
    """A function takes the section it reads, or the workspace. Flows are not counted: the command line calls them."""
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for package in ("flows", "pipeline")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and takes_a_whole_config(node)
        and not any(ast.unparse(decorator).startswith("flow(") for decorator in node.decorator_list)
    ]
    assert len(found) < 25, "\n".join(found)
    assert "pipeline/config/run.py: load" in found


def test_importing_sets_nothing():
    """No variable, no signal, nothing to do at exit, no log level: neither a flow nor a job nor the command line."""
    code = """
import atexit, importlib, json, os, signal, sys
later, register = [], atexit.register
atexit.register = lambda function, *rest, **more: later.append(function.__module__) or register(function, *rest, **more)
def state():
    ours = [name for name in later if name.startswith(("flows", "pipeline", "storage", "models"))]
    return [dict(os.environ), [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)], ours]
before = state()
for name in NAMES:
    importlib.import_module(name)
print(json.dumps([before == state(), sorted({"prefect", "mlflow", "torch"} & {*sys.modules})]))
"""
    light = [
        "flows",
        "flows.runtime.cli",
        "flows.runtime.dlrm",
        "flows.runtime.front",
        "flows.runtime.server",
        "flows.runtime.server_process",
        "pipeline.config",
        "pipeline.jobs.warm_up",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code.replace("NAMES", repr(light))], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[true, []]"
    unused = [
        "torch",
        "torchrec",
        "matplotlib",
        "pyiceberg.catalog.rest",
        "storage.maintenance",
        "storage.layout.ladder",
    ]
    for flow, names in {"end_to_end": unused, "train": [*unused, "duckdb"]}.items():
        ranks_need_the_cores = f"import sys, flows.{flow}; print({{*{names}}} & {{*sys.modules}})"
        done = subprocess.run(
            [sys.executable, "-c", ranks_need_the_cores], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "set()"
    calls = [
        f"{path}:{node.lineno}"
        for package in LAYERS
        for path in (ROOT / package).rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, (ast.Expr, ast.For))
        and not isinstance(getattr(node, "value", None), ast.Constant)
        and path.name != "scorer.py"  # MLflow runs that file to load a model
        and not path.stem.endswith("_private")  # they look whether names are there
    ]
    assert calls == [], "a statement that does something at import"


def test_rooms_are_small():
    rooms = {path.parent for package in LAYERS for path in (ROOT / package).rglob("*.py")} - {ROOT / "flows"}
    sizes = {room: len([path for path in room.glob("*.py") if path.stem != "__init__"]) for room in rooms}
    assert {room: size for room, size in sizes.items() if size > 16} == {}


def test_no_two_public_classes_share_a_name():
    names = [
        node.name
        for package in (*LAYERS, "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == set()


def test_no_module_of_vague_purpose():
    vague = {"utils", "helpers", "manager", "base", "common"}
    assert not [path for package in LAYERS for path in (ROOT / package).rglob("*.py") if path.stem in vague]


def test_the_parser_sees_imports():
    found = set(imports())
    assert (Path("pipeline/jobs/training/rank.py"), "pipeline.training.trainer") in found
    assert (Path("flows/train.py"), "pipeline.jobs.training.run") in found


def test_examples_are_found_where_ray_is_not_installed(monkeypatch):
    """`make test` without the extra: pytest imports every module of the product, but for those that need Ray."""
    monkeypatch.setitem(sys.modules, "ray", None)
    ignored = runpy.run_path(str(ROOT / "conftest.py"))["collect_ignore"]
    assert ignored == [
        "pipeline/jobs/evaluation/ray_portions.py",
        "pipeline/preprocessing/ray_executor.py",
        "pipeline/training/launch/ray_group.py",
    ]
    absent = ("ray", *(name.removesuffix(".py").replace("/", ".") for name in ignored))
    stray = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in LAYERS
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in ignored
        for name in imported_at_once(ast.parse(path.read_text(encoding="utf-8")).body)
        if any(name == one or name.startswith(f"{one}.") for one in absent)
    ]
    assert stray == []


def imported_at_once(statements: list[ast.stmt]) -> Iterator[str]:
    """Yields what importing a module imports: all but what stands in a function or under TYPE_CHECKING."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef | ast.For) or (
            isinstance(node, ast.If) and ast.unparse(node.test) not in ("TYPE_CHECKING", "__name__ == '__main__'")
        ):
            yield from imported_at_once(node.body)
