"""Arrows point down: every import of the product is parsed, and a stray one fails."""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {"flows": {"flows", "pipeline", "storage", "models"}, "pipeline": {"pipeline", "storage", "models"}, "storage": {"storage"}, "models": {"models"}}  # fmt: skip
GROUND = {"errors", "marks", "processes", "figure", "sealed", "data", "transforms", "inference"}
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
}
JOBS = {"jobs", "study"}
"""The rooms of pipeline/ that may import several stages."""
TOOLS = {"__init__", "dataset", "deploy", "doctor", "examples", "ui", "reference", "serve"}
"""Modules of flows/ that are no flows."""
STARTED = {
    "backfill": {"recurring"}, "backtest": {"ingest"}, "end_to_end": {"ingest", "train"}, "recurring": {"ingest", "train"},
}  # fmt: skip
"""Flow -> the flows that it starts."""
CONFIG_IMPORTS = ("pipeline.errors", "pipeline.marks", "storage.config", "storage.names", "pydantic")
"""What the config of a stage may import, beside the standard library and its own room."""
HEAVY = {"torch", "torchrec", "mlflow", "numpy", "numba", "pyarrow", "pyiceberg", "duckdb", "optuna", "prefect"}
"""Libraries that reading a config must not import."""
ORCHESTRATION = {"prefect"}
"""Libraries that only flows/ may import."""
SHARED = {"pipeline", "pipeline/jobs"}
"""Rooms whose modules are for the rooms inside: errors, and a job's workspace and console. They import none of these."""
UPWARD = {
    ("pipeline/data/joined", "pipeline/data"),
    ("pipeline/training/tables", "pipeline/training"),
    ("pipeline/transforms/kernels", "pipeline/transforms"),
    ("pipeline/transforms/kernels", "pipeline/transforms/ops"),
    ("pipeline/transforms/ops", "pipeline/transforms"),
    ("pipeline/transforms/plan", "pipeline/transforms"),
    ("storage/layout", "storage"),
    ("storage/pages", "storage"),
    ("storage/snapshot", "storage"),
}
"""(Room, room around it that it imports), and pairs of rooms that import each other. The list may only shrink."""
CROSSING = {"benchmarks", "engines", "fuzz", "hosts", "simulation"}
"""Folders of tests/ that are no part of the product's tree."""
TOPICS = {
    "flows/test_cache.py",
    "flows/test_gate.py",
    "flows/test_histories.py",
    "flows/test_job.py",
    "flows/test_maps.py",
    "flows/test_outage.py",
    "flows/test_paths.py",
    "flows/test_readme.py",
    "flows/test_rest_catalog.py",
    "flows/test_scoring_benchmark.py",
    "flows/test_servers.py",
    "flows/test_serving.py",
    "flows/test_shared_catalog.py",
    "flows/test_source_table.py",
    "flows/test_thinned.py",
    "pipeline/data/joined/test_histories.py",
    "pipeline/extraction/test_outcomes.py",
    "pipeline/jobs/ingest/test_events.py",
    "pipeline/jobs/recurring/test_judging_days.py",
    "pipeline/jobs/recurring/test_serving_days.py",
    "pipeline/jobs/training/test_takeover.py",
    "pipeline/preprocessing/test_chaos.py",
    "pipeline/preprocessing/test_sessions.py",
    "pipeline/preprocessing/test_weights.py",
    "pipeline/test_bad_input.py",
    "pipeline/test_full_disk.py",
    "pipeline/test_shared_lists.py",
    "pipeline/training/test_options.py",
    "pipeline/training/test_weights.py",
    "pipeline/transforms/test_absent.py",
}
"""Tests of what no single module does: a topic across modules, or a whole command. The list may only shrink."""
BORROWING = {
    "flows/test_scoring_benchmark.py",
    "flows/test_train.py",
    "pipeline/evaluation/test_gate.py",
    "pipeline/transforms/test_ops.py",
}
"""Tests that import benchmarks or other tests. The list may only shrink."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports() -> Iterator[tuple[Path, str]]:
    """(file, imported module) over the whole product."""
    for package in LAYERS:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(parsed(path)):
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
            for node in ast.walk(parsed(path)):
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


def test_only_its_commands_import_the_study():
    """Who reads the pipeline never meets it."""
    stray = [
        f"{path} imports {name}"
        for path, name in imports()
        if name.startswith("pipeline.study") and path.parts[0] != "flows" and path.parts[:2] != ("pipeline", "study")
    ]
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
    allowed = ("prefect", "pydantic", "flows", "pipeline.jobs", "pipeline.study", "pipeline.config", "pipeline.errors")
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
        if imported != "runtime" and imported not in STARTED.get(path.stem, set()):
            stray.append(f"{path} imports {name}")
    assert stray == []


def test_the_config_of_a_stage_imports_little():
    stray = []
    for path, name in imports():
        if path.name != "config.py" or path.parts[0] == "flows" or name.split(".")[0] in sys.stdlib_module_names:
            continue
        room = ".".join(path.parts[:2])
        if not name.startswith((*CONFIG_IMPORTS, f"{room}.")):
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
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and takes_a_whole_config(node)
        and not any(ast.unparse(decorator).startswith("flow(") for decorator in node.decorator_list)
    ]
    assert len(found) < 25, "\n".join(found)
    assert "pipeline/config/run.py: load" in found


@pytest.mark.slow
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
        "storage.snapshot.maintenance",
        "pipeline.study.layout.ladder",
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
        for node in parsed(path).body
        if isinstance(node, (ast.Expr, ast.For))
        and not isinstance(getattr(node, "value", None), ast.Constant)
        and path.name != "scorer.py"  # MLflow runs that file to load a model
        and not path.stem.endswith("_private")  # they check the names that they are for
    ]
    assert calls == [], "a statement that does something at import"


def test_rooms_are_small():
    rooms = {path.parent for package in LAYERS for path in (ROOT / package).rglob("*.py")} - {ROOT / "flows"}
    sizes = {room: len([path for path in room.glob("*.py") if path.stem != "__init__"]) for room in rooms}
    assert {room: size for room, size in sizes.items() if size > 16} == {}


def test_classes_are_small():
    sizes = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for package in LAYERS
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: size for name, size in sizes.items() if size > 300} == {}


def test_no_two_public_classes_share_a_name():
    names = [
        node.name
        for package in (*LAYERS, "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == set()


def test_no_module_of_vague_purpose():
    vague = {"utils", "helpers", "manager", "base", "common"}
    assert not [path for package in LAYERS for path in (ROOT / package).rglob("*.py") if path.stem in vague]


def test_the_parser_sees_imports():
    found = set(imports())
    assert (Path("pipeline/jobs/training/rank/main.py"), "pipeline.training.trainer") in found
    assert (Path("flows/train.py"), "pipeline.jobs.training.run") in found


@pytest.mark.slow
def test_examples_are_found_where_ray_is_not_installed(monkeypatch):
    """`make test` without the extra: pytest imports every module of the product, but for those that need Ray."""
    monkeypatch.setitem(sys.modules, "ray", None)
    ignored = runpy.run_path(str(ROOT / "conftest.py"))["collect_ignore"]
    assert ignored == [
        "pipeline/jobs/evaluation/ray_parallel.py",
        "pipeline/preprocessing/ray_executor.py",
        "pipeline/training/launch/ray_group.py",
    ]
    absent = ("ray", *(name.removesuffix(".py").replace("/", ".") for name in ignored))
    stray = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in LAYERS
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in ignored
        for name in imported_at_once(parsed(path).body)
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


def files_of_product() -> dict[str, Path]:
    """Module -> its file. A room's `__init__.py` has the name of the room."""
    found = (path.relative_to(ROOT) for package in LAYERS for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in found}


def run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walks through a tree, functions included, but not through what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from run_nodes(node)


def arrows() -> dict[str, set[str]]:
    """Module of the product -> other modules of the product that it imports, at once or inside a function."""
    files, found = files_of_product(), {}
    for name, path in files.items():
        imported = set()
        for node in run_nodes(parsed(ROOT / path)):
            if isinstance(node, ast.Import):
                imported |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{one.name}" for one in node.names}
                imported |= whole & files.keys() or {f"{node.module}"}
        found[name] = (imported & files.keys()) - {name}
    return found


def test_no_circle_of_files():
    TopologicalSorter(arrows()).prepare()  # raises a CycleError that names it


def test_no_room_imports_the_one_around_it():
    files = files_of_product()
    rooms = {
        (str(files[name].parent), str(files[other].parent)) for name, others in arrows().items() for other in others
    }
    upward = set()
    for room, other in rooms:
        both = (other, room) in rooms and room != other
        if room.startswith(f"{other}/"):
            upward |= {(room, other)} if both or other not in SHARED else set()
        elif both and not other.startswith(f"{room}/"):
            upward.add((min(room, other), max(room, other)))
    assert upward == UPWARD


def files_of_tests() -> dict[str, Path]:
    """Path below tests/ -> file, of all modules of tests/."""
    return {str(path.relative_to(ROOT / "tests")): path for path in sorted((ROOT / "tests").rglob("*.py"))}


def belongs(name: str) -> bool:
    """Whether a test has the name of a module or a room. Tests of flows/runtime lie with those of the commands."""
    own = Path(name.replace("test_", "", 1))
    places = [ROOT / own, *([ROOT / "flows" / "runtime" / own.name] if own.parts[0] == "flows" else [])]
    return any(place.exists() or place.with_suffix("").is_dir() for place in places)


def test_tests_mirror_the_tree():
    names = [name for name, path in files_of_tests().items() if path.name.startswith("test_") and "/" in name]
    assert {name for name in names if name.split("/")[0] not in CROSSING and not belongs(name)} == TOPICS


@pytest.mark.slow
def test_what_tests_share_is_in_no_test():
    stray = set()
    for name, path in files_of_tests().items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and not name.startswith("benchmarks/"):
                imported = [f"{node.module}.{one.name}" for one in node.names]
                if any(one.startswith("benchmarks.") or re.match(r"tests\..*\btest_", one) for one in imported):
                    stray.add(name)
    assert stray == BORROWING


def test_the_name_of_a_test_is_a_sentence():
    found = [
        f"{name}: {node.name}"
        for name, path in files_of_tests().items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and re.match(r"test_([a-z]+_)?\d+_", node.name)
    ]
    assert found == []
