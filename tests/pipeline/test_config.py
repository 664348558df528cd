"""Configs: base files, environment, overrides, identity, and one sentence for each error."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import load
from pipeline.config.files import ROOT, home_path, put, read_yaml
from pipeline.data.formats.files import find_files
from pipeline.errors import ConfigError
from pipeline.jobs.training.identity import identity
from pipeline.jobs.workspace import Workspace
from pipeline.study.points.load import StudyConfig, load_study
from pipeline.study.points.points import list_points
from pipeline.transforms.ops import known_kinds

MINIMAL: dict[str, Any] = {
    "name": "toy",
    "source": {"path": "rows.csv", "day": "2024-01-01"},
    "features": {"sparse": [{"columns": "user", "transforms": [{"kind": "sigrid_hash", "size": 9}]}]},
    "split": {"hash": {"key": "user", "shares": {"train": 0.5, "test": 0.5}}},
}


@pytest.fixture(autouse=True)
def _no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLRM_HOME", raising=False)


def write(path: Path, **content: Any) -> Path:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def sentence(values: Any, overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load(values, overrides)
    return str(error.value)


def ops(*transforms: dict[str, Any]) -> dict[str, Any]:
    return MINIMAL | {"features": {"sparse": [{"columns": "user", "transforms": list(transforms)}]}}


@pytest.mark.parametrize(
    "path",
    sorted({*(ROOT / "configs").rglob("*.yaml")} - {*(ROOT / "configs" / "machines").iterdir()}),
    ids=lambda path: path.name,
)
def test_each_config_of_the_project_loads(path: Path) -> None:
    """Those of the paper's studies with their own section, and without it as plain ones."""
    read = load_study if path.parent.name == "paper" else load
    config = read(path)
    assert read(config) == config
    assert read(str(path.relative_to(ROOT))) == config
    assert type(config).model_validate_json(config.model_dump_json()) == config
    if isinstance(config, StudyConfig):
        assert load(config.run) == config.run


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "paper").glob("*.yaml")), ids=lambda path: path.name)
def test_each_point_of_the_papers_experiments_is_a_config(path: Path) -> None:
    at_scale = list_points(load_study(path).characterize)
    assert len({point.key for point in at_scale}) == len(at_scale) <= 24
    for point in at_scale:
        load_study(path, dict(point.settings))


def test_a_path_is_looked_up_in_the_current_folder_then_in_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.yaml", **MINIMAL)
    assert load("mine.yaml").name == "toy"
    assert load("configs/demo.yaml").name == "demo"


def test_a_file_overrides_its_base(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", **MINIMAL, training={"epochs": 2, "batch_rows": 64}, evaluation={"slices": ["a", "b"]})
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "b.yaml", base="../a.yaml", training={"epochs": 3}, evaluation={"slices": ["c"]})
    write(tmp_path / "c.yaml", base="sub/b.yaml", name="top", training={"batch_rows": None})
    assert read_yaml(tmp_path / "c.yaml") == MINIMAL | {
        "name": "top",
        "source": MINIMAL["source"] | {"path": str(tmp_path / "rows.csv")},
        "training": {"epochs": 3, "batch_rows": None},
        "evaluation": {"slices": ["c"]},
    }


def test_relative_data_paths_start_at_their_file_and_those_of_overrides_at_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the command is started, in a checkout as with a wheel. Texts that are no data paths stay."""
    here = tmp_path / "here"
    for folder in (here, tmp_path / "team" / "ads", tmp_path / "odd[1]"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("TOY_DATA", "given")
    monkeypatch.delenv("TOY_LOGS", raising=False)
    log = {"on": "user", "time": "at", "as_of": "at", "last": 3, "columns": ["item"]}
    below = MINIMAL | {
        "source": {
            "path": ["a/*.csv", "../../b.csv", "/c.csv", "s3://bucket/d.csv", "~/e.csv", "${TOY_DATA:-x}/f", "${TOY_LOGS:-.}/g"],
            "day_column": "day", "rename": {"path": "page"}, "outcomes": {"path": "./out/*"},
            "lookups": [{"path": "side.csv", "on": "user"}],
        },
        "events": {"seen": {"path": "seen/*", "key": "user", "time": "at"}},
    }  # fmt: skip
    write(tmp_path / "team" / "base.yaml", **below)
    features = MINIMAL["features"] | {
        "histories": [{"path": "log/*", **log}],
        "joined": [{"path": "j.csv", "on": "user"}],
    }
    candidate = {"big": {"features.joined.0.path": "k.csv"}}
    write(tmp_path / "team/ads/top.yaml", base="../base.yaml", features=features, release={"candidates": candidate})
    team, ads = tmp_path / "team", tmp_path / "team" / "ads"
    for config in (load("../team/ads/top.yaml"), load(load(ads / "top.yaml"))):  # also as it was recorded
        source = config.source
        assert source.path == (
            f"{team}/a/*.csv", f"{tmp_path.parent}/b.csv", "/c.csv", "s3://bucket/d.csv", "~/e.csv", f"{here}/given/f", f"{team}/g",
        )  # fmt: skip
        assert (source.outcomes and source.outcomes.path, source.lookups[0].path) == (
            f"{team}/out/*",
            f"{team}/side.csv",
        )
        assert (source.rename, config.events["seen"].path) == ({"path": "page"}, f"{team}/seen/*")
        assert [one.path for one in config.features.sources] == [f"{ads}/j.csv", f"{ads}/log/*"]
        assert config.release.candidates["big"]["features.joined.0.path"] == f"{ads}/k.csv"
    config = load(ads / "top.yaml", {"source.path": ["x.csv"], "source.path.0": "y.csv", "features.joined.0.path": "z"})
    assert (config.source.path, config.features.joined[0].path) == ((f"{here}/y.csv",), f"{here}/z")
    assert load(MINIMAL).source.path == f"{here}/rows.csv"
    (tmp_path / "odd[1]" / "rows.csv").write_text("user\n1\n")
    odd = load(write(tmp_path / "odd[1]" / "mine.yaml", **MINIMAL)).source.path
    assert odd is not None
    assert find_files(odd, Path("/"), "source.path") == [tmp_path / "odd[1]" / "rows.csv"]
    with pytest.raises(ConfigError, match=f"none at '{here}/rows.csv'"):
        find_files(load(MINIMAL).source.path or "", Path("/"), "source.path")


def test_environment_variables_are_substituted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_EPOCHS", "4")
    monkeypatch.delenv("TOY_NAME", raising=False)
    path = write(
        tmp_path / "a.yaml",
        **MINIMAL | {"name": "${TOY_NAME:-spare}_1"},
        training={"epochs": "${TOY_EPOCHS}"},
        evaluation={"slices": ["${TOY_NAME:-}x", "$HOME", "${TOY_EPOCHS:-9}"]},
    )
    config = load(path)
    assert (config.name, config.training.epochs, config.evaluation.slices) == ("spare_1", 4, ("x", "$HOME", "4"))
    write(path, **MINIMAL | {"name": "${TOY_NAME}"})
    assert sentence(path) == "${TOY_NAME}: expected an environment variable, got none of that name. Set TOY_NAME."


def test_overrides_reach_any_depth() -> None:
    config = load(
        MINIMAL,
        {"training.epochs": 7, "seed": 3, "split.hash.shares.test": 0.25, "training.dense_learning_rate": "1e-2"},
    )
    assert (config.training.epochs, config.seed, config.split.hash.shares["test"]) == (7, 3, 0.25)
    assert config.training.dense_learning_rate == 0.01
    assert MINIMAL["split"]["hash"]["shares"]["test"] == 0.5  # the input is unchanged
    assert load(config, {"seed": 4}).seed == 4
    sized = load(MINIMAL, {"features.sparse.0.transforms.0.size": 5})
    assert sized.features.sparse[0].transforms[0].size == 5
    assert MINIMAL["features"]["sparse"][0]["transforms"][0]["size"] == 9


@pytest.mark.parametrize(
    ("environment", "home", "expected"),
    [
        (None, ".dlrm", ROOT / ".dlrm"),
        (None, "/data/runs", Path("/data/runs")),
        (None, "~/runs", Path.home() / "runs"),
        ("elsewhere", "/data/runs", ROOT / "elsewhere"),
        ("/tmp/x", ".dlrm", Path("/tmp/x")),
        ("", ".dlrm", ROOT / ".dlrm"),
    ],
)
def test_home(environment: str | None, home: str, expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if environment is not None:
        monkeypatch.setenv("DLRM_HOME", environment)
    assert load(MINIMAL, {"home": home}).home_path == home_path(home) == expected


EXECUTION = {
    "evaluation.slices": ["a"],
    "home": "/elsewhere",
    "preprocessing.workers": 5,
    "training.device": "cpu",
    "training.threads_per_rank": 3,
    "training.log_every_steps": 9,
    "training.checkpoint_every_steps": 9,
    "training.keep_checkpoints": 9,
    "training.deadline_seconds": 9,
    "registration.defaults": {"age": 30},
    "scoring.keep": ["user"],
    "features.allow_deprecated": True,
    "features.sparse.0.on_missing": "default",
    "sweep.trials": 5,
    "release.keep": 3,
    "warehouse.codec": "lz4",
    "source.path": "moved.csv",
}
SEMANTIC = {
    "name": "other",
    "seed": 2,
    "features.derived": [{"kind": "first_x", "limit": 2, "inputs": ["user"], "output": "first"}],
    "training.epochs": 2,
    "training.batch_rows": 64,
    "training.world_size": 1,
    "training.sharding": "table_wise",
    "preprocessing.shuffle_window_rows": 10,
    "preprocessing.session_column": "user",
    "model.embedding_width": 8,
    "features.label": "click",
    "registration.weights": "int8",
}


@pytest.mark.parametrize("key", EXECUTION)
def test_identity_stays_when_only_execution_changes(key: str) -> None:
    assert identity(Workspace(load(MINIMAL, {key: EXECUTION[key]})), {}, "plan") == identity(
        Workspace(load(MINIMAL)), {}, "plan"
    )


@pytest.mark.parametrize("key", SEMANTIC)
def test_identity_changes_with_what_is_learned(key: str) -> None:
    assert identity(Workspace(load(MINIMAL, {key: SEMANTIC[key]})), {}, "plan") != identity(
        Workspace(load(MINIMAL)), {}, "plan"
    )


def test_identity_stays_the_same_with_and_without_deduplication() -> None:
    sessions = {"preprocessing.session_column": "user"}
    once = load(MINIMAL, sessions | {"preprocessing.deduplicate": ["user"]})
    assert identity(Workspace(once), {}, "plan") == identity(Workspace(load(MINIMAL, sessions)), {}, "plan")


def test_identity_names_rows_plan_and_model_and_is_of_fixed_length() -> None:
    config, other = load(MINIMAL), load(MINIMAL, {"registration.model_name": "other"})
    first = identity(Workspace(config), {}, "plan")
    assert first not in (identity(Workspace(config), {"train": {}}, "plan"), identity(Workspace(config), {}, "other"))
    assert first != identity(Workspace(other), {}, "plan")
    assert len(first) == 32


def test_parameters_are_flat() -> None:
    flat = load(MINIMAL, {"seed": 3}).flat()
    assert (flat["name"], flat["seed"], flat["training.epochs"], flat["split.hash.shares.test"]) == ("toy", 3, 1, 0.5)
    assert not any(isinstance(value, dict) or key.startswith(("source", "features")) for key, value in flat.items())


def test_a_model_is_named_after_the_run_by_default() -> None:
    assert load(MINIMAL).model_name == "toy"
    assert load(MINIMAL, {"registration.model_name": "champion"}).model_name == "champion"
    with pytest.raises(ConfigError) as caught:
        load(MINIMAL, {"registration.model_name": "o'hara"})
    assert str(caught.value) == (
        'registration.model_name: expected a name without quotes, / and :, got "o\'hara". Rename it.'
    )


TOP = "name, home, seed, source, ingest, warehouse, features, filter, split, preprocessing, model, training, "
"evaluation, registration"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            MINIMAL | {"training": {"epoch": 2}},
            "key 'training.epoch': expected a known key, got 'epoch'. Did you mean 'epochs'?",
        ),
        (
            MINIMAL | {"training": {"learning_rate": 2}},
            "key 'training.learning_rate': expected a known key, got 'learning_rate'. "
            "Did you mean 'table_learning_rate' or 'dense_learning_rate'?",
        ),
        (MINIMAL | {"sead": 2}, "key 'sead': expected a known key, got 'sead'. Did you mean 'seed'?"),
        (MINIMAL | {"split": {"hsh": 1}}, "key 'split.hsh': expected a known key, got 'hsh'. Did you mean 'hash'?"),
        (
            MINIMAL | {"split": {"column": {"name": "x", "zzz": 1}}},
            "key 'split.column.zzz': expected a known key, got 'zzz'. Known here: name, train, valid, test.",
        ),
        (
            ops({"kind": "first_x", "limt": 3}),  # the misspelt key is named, not the key that it should be
            "key 'features.sparse.0.transforms.0.first_x.limt': expected a known key, got 'limt' (1 more). Did you "
            "mean 'limit'?",
        ),
        (
            MINIMAL
            | {"features": {"sparse": [{"colums": "user", "transforms": [{"kind": "sigrid_hash", "size": 9}]}]}},
            "key 'features.sparse.0.colums': expected a known key, got 'colums' (1 more). Did you mean 'columns'?",
        ),
        (
            MINIMAL | {"training": {"epochs": "many"}},
            "key 'training.epochs': expected a valid integer, unable to parse string as an integer, got 'many'. "
            "Correct the value.",
        ),
        (
            MINIMAL | {"preprocessing": {"workers": 0}},  # a field of several types: one error, not one for each type
            "key 'preprocessing.workers': expected 'auto' or greater than 0, got 0. Correct the value.",
        ),
        (
            MINIMAL | {"evaluation": {"slices": [1, 1]}},
            "key 'evaluation.slices.0': expected a valid string, got 1 (1 more). Correct the value.",
        ),
        (
            MINIMAL | {"training": {"epochs": "many", "batch_rows": "many"}},
            "key 'training.batch_rows': expected a valid integer, unable to parse string as an integer, got 'many' "
            "(1 more). Correct the value.",
        ),
        (MINIMAL | {"seed": -1}, "key 'seed': expected greater than or equal to 0, got -1. Correct the value."),
        (
            MINIMAL | {"seed": -1, "training": {"epochs": 0}},
            "key 'seed': expected greater than or equal to 0, got -1 (1 more). Correct the value.",
        ),
        ({k: v for k, v in MINIMAL.items() if k != "split"}, "key 'split': expected a value, got none. Add the key."),
        (
            ops({"kind": "nope"}),
            "key 'features.sparse.0.transforms.0': expected a kind among "
            f"{', '.join(repr(kind) for kind in sorted(known_kinds()))}, got 'nope'. Correct it.",
        ),
        (
            ops({"size": 9}),
            "key 'features.sparse.0.transforms.0': expected a mapping with a `kind`, got {'size': 9}. Add it.",
        ),
        (
            MINIMAL | {"features": {"sparse": []}},
            "key 'features.sparse': expected at least one entry, got none. Add one.",
        ),
    ],
)
def test_one_sentence_for_a_bad_value(values: dict[str, Any], said: str) -> None:
    assert sentence(values) == f"config, {said}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"name": "a b"},
            "name: expected letters, digits and _, ^[A-Za-z_][A-Za-z0-9_]{0,127}$, got 'a b'. Rename it.",
        ),
        (
            {"name": "../x"},
            "name: expected letters, digits and _, ^[A-Za-z_][A-Za-z0-9_]{0,127}$, got '../x'. Rename it.",
        ),
        (
            {"name": "ads_held"},
            "name: expected a name without one of the endings _features, _held, _profile, _quarantine, _scores, "
            "got 'ads_held'. Rename it: that table belongs to the config 'ads'.",
        ),
        (
            {"name": "a\n"},
            "name: expected letters, digits and _, ^[A-Za-z_][A-Za-z0-9_]{0,127}$, got 'a\\n'. Rename it.",
        ),
        (
            {"filter": "1=1; drop table x"},
            "filter '1=1; drop table x': expected comparisons of columns with constants, joined by and, or, not, "
            "got '1=1; drop table x' at character 1. Write it like \"country = 'DE' and age >= 18\".",
        ),
        (
            {"characterize": {"steps": 2}},
            "config, key 'characterize': expected a known key, got 'characterize'. Only dlrm characterize and dlrm "
            "estimate read it. Give them this file, or leave it out.",
        ),
        ({"split": {}}, "split: expected one of days, every_nth_day, column, hash, got none. Give exactly one."),
        *(
            ({"source": source}, f"source: expected {keys}. Give exactly one.")
            for source, keys in [
                ({"day": "2024-01-01"}, "one of `path`, `table` and `generator`, got none of them"),
                ({"path": "a.csv"}, "either `day_column` or `day`, got neither"),
                ({"path": "a.csv", "day": "2024-01-01", "day_column": "day"}, "either `day_column` or `day`, got both"),
            ]
        ),
    ],
)
def test_contradicting_values_are_refused(change: dict[str, Any], said: str) -> None:
    assert sentence(MINIMAL | change) == said


@pytest.mark.parametrize(
    ("key", "said"),
    [("features.sparse.1.pooling", "1"), ("features.sparse.x", "x"), ("features.sparse.-1.pooling", "-1")],
)
def test_an_override_outside_a_list_is_refused(key: str, said: str) -> None:
    assert sentence(MINIMAL, {key: 1}) == (
        f"override '{key}': expected the number of a section, below 1, got '{said}'. Correct the key."
    )


@pytest.mark.parametrize("key", ["name.x", "name.x.y"])
def test_an_override_below_a_value_is_refused(key: str) -> None:
    assert sentence(MINIMAL, {key: 1}) == f"override '{key}': expected a section 'name', got str. Correct the key."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1, 2]", "expected a mapping of keys, got list. See configs/demo.yaml."),
        (b"", "expected a mapping of keys, got NoneType. See configs/demo.yaml."),
        (b"name: \xff", "expected text in UTF-8, got other bytes. Save the file as UTF-8."),
        (
            b"name: a\nsource: {}\nname: b",
            "expected valid YAML, got key 'name' twice, in lines 1 and 3. Mind indentation and colons.",
        ),
        (
            b"model:\n  top_mlp: [1]\n  top_mlp: [2]",
            "expected valid YAML, got key 'top_mlp' twice, in lines 2 and 3. Mind indentation and colons.",
        ),
        (None, "expected a readable YAML file, got none. Correct the path; `dlrm examples` writes examples."),
        (b"base: bad.yaml", "expected a `base` that ends somewhere, got a circle. Remove one `base`."),
    ],
)
def test_files_that_are_not_a_config_are_refused(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_bytes(content)
    assert sentence(path) == f"config '{path}': {said}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seed: 2024-02-30", "day is out of range for month"),
        ("seed: " + "9" * 5_000, "Exceeds the limit"),
        ("name: !!timestamp now", "AttributeError"),
        ("name: " + "[" * 100_000, "values inside values"),
        ("name: " + "[" * 200 + "]" * 200, "values inside values"),
        ("a: &a [*a]", "a value inside itself"),
        ("a: &a {b: *a}", "a value inside itself"),
        ('name: "\\ud800"', "surrogates not allowed"),
        ("\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]), "aliases"),
    ],
    ids=["date", "digits", "tag", "deep", "half as deep", "circle", "circle of keys", "half a character", "bomb"],
)
def test_yaml_that_no_config_has_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    said = sentence(path)
    assert said.startswith(f"config '{path}': expected valid YAML, got ")
    assert reason in said
    assert said.endswith("Mind indentation and colons.")


@pytest.mark.parametrize("base", ["/dev/zero", ".", "a\0b", "x" * 5_000])
def test_a_base_that_is_no_file_is_refused(base: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"base: {yaml.safe_dump(base)}")
    got = "a folder" if base == "." else "none"
    assert sentence(path).endswith(
        f"expected a readable YAML file, got {got}. Correct the path; `dlrm examples` writes examples."
    )


def test_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    """Also where the mapping that gives it again is merged itself, before it is read."""
    path = tmp_path / "good.yaml"
    path.write_text("c: &c {k: 1, m: 2}\nx: {inner: &a {<<: *c, k: 3}}\nb: {<<: *a, m: 4}\n")
    assert read_yaml(path) == {"c": {"k": 1, "m": 2}, "x": {"inner": {"k": 3, "m": 2}}, "b": {"k": 3, "m": 4}}


def test_an_alias_may_be_used_many_times(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text("one: &one {a: [1, 2]}\n" + "".join(f"other{n}: *one\n" for n in range(1_000)))
    assert read_yaml(path)["other999"] == {"a": [1, 2]}


def test_other_files_that_are_not_a_config_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("a: b: c")
    assert sentence(path) == (
        f"config '{path}': expected valid YAML, got mapping values are not allowed here "
        "in line 1, column 5. Mind indentation and colons."
    )
    path.write_text("warehouse:\n  catalog: {password: hunter2, uri: [}")
    assert "hunter2" not in sentence(path)
    path.write_text("base: [a, b]")
    assert sentence(path) == f"config '{path}', key 'base': expected a file name, got ['a', 'b']. Correct the value."
    path.write_text("name: !!python/object/apply:os.getcwd []")
    assert sentence(path).startswith(f"config '{path}': expected valid YAML, got could not determine a constructor")


def test_passwords_are_not_passed_on():
    over = {
        "warehouse": {"catalog": {"s3.secret-access-key": "hunter2"}},
        "registration": {"tracking_uri": "sql://u:hunter2@h"},
    }
    config = load("configs/demo.yaml", over)
    assert config.warehouse.catalog["s3.secret-access-key"] == "hunter2"
    assert "hunter2" not in str(config.flat()) + str(config.shareable())


@pytest.mark.parametrize(
    ("preprocessing", "sentence"),
    [
        (
            {"executor": "process", "ray_address": "10.0.0.1:6379", "transport": "memory"},
            "preprocessing.transport with training.launcher=ray: expected network or auto: other machines have no part "
            "in this machine's memory, got memory. Leave preprocessing.transport out.",
        ),
        (
            {"executor": "inline", "transport": "network"},
            "preprocessing.transport 'network': expected an executor with workers, got inline: each rank reads for "
            "itself. Set preprocessing.executor=process or ray.",
        ),
    ],
)
def test_batches_have_a_way_to_the_ranks(preprocessing: dict[str, str], sentence: str) -> None:
    keys = {"training.launcher": "ray"} | {f"preprocessing.{key}": value for key, value in preprocessing.items()}
    with pytest.raises(ConfigError) as caught:
        load("configs/smoke.yaml", keys)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("section", ["training", "preprocessing"])
def test_resources_are_those_of_a_cluster(section: str) -> None:
    own = {"training.launcher": "ray"} if section == "training" else {"preprocessing.executor": "ray"}
    keys = {"preprocessing.executor": "inline", **own, f"{section}.resources": {"big": 1}}
    with pytest.raises(ConfigError) as caught:
        load("configs/smoke.yaml", keys)
    assert str(caught.value) == (
        f"{section}.resources: expected preprocessing.ray_address, the cluster that has them, got None, which starts Ray "
        "on this machine. Set it, or leave out the resources."
    )
    with pytest.raises(
        ConfigError, match=rf"{section}\.labels: expected preprocessing\.ray_address.* leave out the labels"
    ):
        load("configs/smoke.yaml", keys | {f"{section}.resources": {}, f"{section}.labels": {"zone": "a"}})
    keys |= {"preprocessing.ray_address": "10.0.0.1:6379", f"{section}.resources": {"GPU": 1}}
    with pytest.raises(ConfigError) as caught:
        load("configs/smoke.yaml", keys)
    assert str(caught.value) == (
        f"{section}.resources: expected resources that your nodes were started with, got GPU. Leave it out. "
        "training.device=cuda reserves one for each rank."
    )


@pytest.mark.parametrize("kind", ["table_row_wise", "grid_shard"])
def test_a_table_is_not_divided_among_the_ranks_of_a_host_that_the_planner_does_not_know(kind: str) -> None:
    keys = {"training.launcher": "external", "training.sharding": kind, "preprocessing.executor": "inline"}
    keys |= {"training.table_optimizer": "adagrad"}
    with pytest.raises(ConfigError) as caught:
        load("configs/smoke.yaml", keys)
    assert str(caught.value) == (
        "training.sharding with launcher=external: expected types that do not divide a table among the ranks of one "
        f"host, because training.hosts=1 names no hosts, got {kind}. Set training.hosts, choose another type, or "
        "launcher: processes."
    )
    assert load("configs/smoke.yaml", keys | {"training.launcher": "processes"}).training.sharding == kind
    assert load("configs/smoke.yaml", keys | {"training.hosts": 2}).training.ranks_per_host == 1


NO_HOSTS: dict[str, tuple[dict[str, Any], str]] = {
    "uneven": (
        {"training.hosts": 2, "training.world_size": 3, "training.launcher": "external"},
        "training.hosts: expected a divisor of world_size=3, got 2. Change one of them: each host has as many ranks.",
    ),
    "processes": (
        {"training.hosts": 2},
        "training.hosts with launcher=processes: expected 1, since processes are on this machine, got 2. "
        "Leave it out, or set launcher: ray or external.",
    ),
    "a temporary cluster": (
        {"training.hosts": 2, "training.launcher": "ray"},
        "training.hosts with launcher=ray: expected preprocessing.ray_address, the cluster that has them, got None, "
        "which starts Ray on this machine. Set it, or leave out hosts.",
    ),
    "shared tables": (
        {"training.hosts": 2, "training.launcher": "external", "training.sync": "hogwild"},
        "training.launcher with sync=hogwild: expected processes, since ranks share memory of one machine, "
        "got external. Change it, or set sync: synchronous.",
    ),
}


@pytest.mark.parametrize("case", NO_HOSTS)
def test_hosts_that_the_ranks_cannot_be_on_are_refused(case: str) -> None:
    keys, sentence = NO_HOSTS[case]
    with pytest.raises(ConfigError) as caught:
        load("configs/smoke.yaml", {"preprocessing.executor": "inline", **keys})
    assert str(caught.value) == sentence


def test_hosts_are_part_of_the_identity_only_if_the_planner_knows_them() -> None:
    """As the sharding is: its sums differ in their last bits."""
    keys = {"training.launcher": "external", "preprocessing.executor": "inline"}
    one, two, same = (
        load("configs/smoke.yaml", keys | more).semantics()["training"]
        for more in ({}, {"training.hosts": 2, "training.network_bytes_per_second": 1e9}, {"training.hosts": 1})
    )
    assert one == same
    assert two == one | {"hosts": 2, "network_bytes_per_second": 1e9}
    lanes = [
        load("configs/smoke.yaml", keys | {"training.lanes": 4, "training.hosts": hosts}).semantics()
        for hosts in (1, 2)
    ]
    assert lanes[0] == lanes[1]


def test_numbers_of_yaml_1_1_are_text(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "zips: [010, 08, 00]\ntime: 1:30\nnumbers: [10, -5, 0, 100_000, 0x1f, 1.5, 3.0e-4]\n"
    )
    assert read_yaml(tmp_path / "a.yaml") == {
        "zips": ["010", "08", "00"], "time": "1:30", "numbers": [10, -5, 0, 100_000, 31, 1.5, 3.0e-4],
    }  # fmt: skip


@pytest.mark.parametrize("sign", "#?")
def test_a_home_whose_path_would_be_cut_is_refused(tmp_path, monkeypatch, sign):
    """Iceberg would write its metadata to the path before the #, SQLite open the file before the ?."""
    monkeypatch.delenv("DLRM_HOME", raising=False)
    with pytest.raises(ConfigError) as error:
        home_path(f"{tmp_path}/a{sign}b")
    assert str(error.value) == (
        f"home: expected a path without # and ?, got '{tmp_path}/a{sign}b'. Choose another folder."
    )


def test_a_home_in_an_object_store_is_refused(monkeypatch):
    """It would become a local folder of that name."""
    monkeypatch.setenv("DLRM_HOME", "s3://bucket/home")
    with pytest.raises(ConfigError, match="home: expected a folder on a disk of this machine, got 's3://bucket/home'"):
        home_path("anything")


@pytest.mark.parametrize("config", ["configs/demo.yaml", "configs/flights.yaml", "configs/movielens100k.yaml"])
def test_the_report_compares_with_baselines_which_are_no_part_of_the_training(config):
    found = load(config)
    assert found.evaluation.baselines == ("rate", "logistic", "boosting")
    assert load(config, {"evaluation.baselines": []}).semantics() == found.semantics()


@pytest.mark.parametrize("path", ["/data/trainings", "s3:/bucket/trainings", "s3://", "abfs://bucket/trainings"])
def test_a_path_that_is_no_address_of_a_store_is_refused(path):
    sentence = (
        rf"key 'storage.path': expected an address such as s3://bucket/folder or .*, got '{path}'. Correct the value"
    )
    with pytest.raises(ConfigError, match=sentence):
        load("configs/smoke.yaml", {"storage.path": path})


def test_an_override_reaches_keys_that_are_dotted_themselves() -> None:
    """Each in an empty section, and where the file has it and others."""
    values: dict[str, Any] = {
        "characterize": {"axes": {"training.batch_rows": [1, 2], "mlp": {"wide": {"model.dropout": 0.1}}}},
        "sweep": {"space": {"training.epochs": {"low": 1, "high": 3}}},
    }
    wanted: dict[str, Any] = {
        "characterize.axes.training.batch_rows": ({}, {"training.batch_rows": 7}),
        "characterize.axes.mlp": ({}, {"mlp": 7}),
        "characterize.axes.mlp.wide.model.dropout": (
            values, {"training.batch_rows": [1, 2], "mlp": {"wide": {"model.dropout": 7}}},
        ),
        "characterize.axes.workload.lookups": (values, values["characterize"]["axes"] | {"workload.lookups": 7}),
        "sweep.space.training.epochs.low": (values, {"training.epochs": {"low": 7, "high": 3}}),
        "sweep.space.features.sparse.0.rows": (values, values["sweep"]["space"] | {"features.sparse.0.rows": 7}),
        "sweep.trial_overrides.training.max_steps": ({}, {"training.max_steps": 7}),
        "release.explore.training.max_steps": ({}, {"training.max_steps": 7}),
        "release.fresh.split.days.train": ({}, {"split.days.train": 7}),
        "release.candidates.wide.model.dropout": ({}, {"wide": {"model.dropout": 7}}),
    }  # fmt: skip
    for key, (given, expected) in wanted.items():
        section, name = key.split(".")[:2]
        assert put(given, key.split("."), 7, key)[section][name] == expected, key


def test_an_axis_is_named_on_the_command_line() -> None:
    axes = load_study("configs/smoke.yaml", {"characterize.axes.training.batch_rows": [200]}).characterize.axes
    assert axes == {"training.batch_rows": (200,)}
