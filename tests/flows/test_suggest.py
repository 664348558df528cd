"""A config suggested for a table or for files, and a training with that config unchanged."""

import os
import re
from functools import partial
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from flows.suggest import suggest
from flows.train import train
from pipeline.config import RunConfig, load
from pipeline.config.draft import load_draft
from pipeline.errors import ConfigError
from pipeline.jobs.features.suggest import given_source
from tests.homes import CONFIG


def test_a_draft_needs_a_source_and_nothing_else(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: own\nsource: {path: rows.csv, day: 2025-01-01}\nfeatures: {label: clicked}\n")
    assert load_draft(path).features.label == "clicked"
    assert load_draft(CONFIG, {"features.label": "y"}).features.label == "y"
    with pytest.raises(ConfigError, match=r"suggest: expected a config with a source, or path=FILES, got neither"):
        given_source(load_draft({}), None, None, None)
    given = given_source(load_draft({}), "rows.csv", "clicked", "date")
    assert (given.source.path, given.source.day_column, given.source.day) == (os.path.abspath("rows.csv"), "date", None)
    assert given.features.label == "clicked"


def test_a_draft_keeps_the_other_sections_and_checks_them():
    found = load_draft(CONFIG, {"seed": 9, "training.epochs": 7}).sections()
    assert (found["name"], found["seed"], found["training"]["epochs"]) == ("smoke", 9, 7)
    assert not found.keys() & {"features", "split", "sweep", "release", "recurring"}
    assert list(found) == [key for key in RunConfig.model_fields if key in found]
    assert load_draft(load(CONFIG)).sections() == load_draft(CONFIG).sections()
    with pytest.raises(ConfigError, match=r"key 'training\.epoch': expected a known key.*Did you mean 'epochs'"):
        load_draft(CONFIG, {"training.epoch": 7})
    with pytest.raises(ConfigError, match=r"expected a known key, got 'trainin'"):
        load_draft(CONFIG, {"trainin.epochs": 7})
    with pytest.raises(ConfigError, match=r"Set features\.weight=sample_weight"):
        load_draft(CONFIG, {"source.outcomes.keep_negatives": 0.2})


def test_files_alone_give_a_whole_config(command, tmp_path):
    rows = pd.DataFrame({"user": [i % 40 for i in range(600)], "age": [float(i * i % 1_000) for i in range(600)]})
    rows["clicked"], rows["date"] = (rows.index % 7 < 2).astype(int), pd.Timestamp("2025-01-06") + pd.to_timedelta(rows.index // 200, unit="D")  # fmt: skip
    rows.to_parquet(tmp_path / "rows.parquet")
    words = ("name=own", f"path={tmp_path}/rows.parquet", "label=clicked", "day_column=date")
    code, result, _ = run(command, *words, home=tmp_path / "home")
    assert (code, result["dense"], result["sparse"], result["rows"], result["days"]) == (0, 1, 1, 600, 3)
    config = load(result["config_path"])
    assert (config.name, config.features.label, config.source.day_column) == ("own", "clicked", "date")
    assert config.split.days.test == ("2025-01-08",)


def test_columns_that_the_config_makes_and_the_suggestion_lacks_are_named(command, tmp_path):
    histories = {"features.histories": [{"table": "log", "as_of": "at"}], "features.derived": [{"kind": "ngram"}]}
    given = load_draft(load_draft(CONFIG, {"source.generator.rows_per_day": 1_000, **histories}))
    result = suggest(given, {"home": str(tmp_path / "home")})
    note = "not taken over from the config, add what you need: features.derived, features.histories"
    assert result["notes"] == [note]
    with open(result["config_path"]) as file:
        assert note in re.sub(r"[\s#]+", " ", file.read())
    load(result["config_path"])


def test_without_a_table_the_source_is_inspected(command, tmp_path):
    code, result, _ = command(suggest, CONFIG, "source.generator.rows_per_day=1_000", home=tmp_path / "home")
    assert (code, result["looked_at"], result["rows"], result["days"]) == (0, "files of the source", 4_000, 4)
    assert load(result["config_path"]).features.label == "label"


def run(command, *words, home):
    """Runs `python -m flows.suggest` without a config."""
    with pytest.MonkeyPatch.context() as patch:
        from flows.runtime import cli

        patch.setattr(cli, "main", partial(cli.main, read=load_draft, without_config={}))
        return command(suggest, *words, home=home)


def test_odd_files_are_read_by_what_the_file_of_the_suggestion_says(command, tmp_path):
    """Names with blanks, a label in words, a day in seconds, numbers with words among them."""
    lines = [
        f"{i % 40},{'clicked' if i % 3 else 'seen'},{1736121600 + i * 900},{f'{i}.5' if i % 7 else 'unknown'},Kiel"
        for i in range(300)
    ]
    lines += [f"{i},,1736121600,unknown,Ulm" for i in range(5)]
    (tmp_path / "odd.csv").write_text("\n".join(["user id,to buy?,clock,price-now,city", *lines]) + "\n")
    words = ("name=odd", f"path={tmp_path}/odd.csv", "label=to buy?", "day_column=clock")
    code, result, printed = run(command, *words, home=tmp_path / "home")
    assert code == 0, result
    config = load(result["config_path"])
    assert (config.source.positive, config.source.day_unit, config.features.label) == ("clicked", "seconds", "to_buy_")
    assert config.source.rename == {"user id": "user_id", "to buy?": "to_buy_", "price-now": "price_now"}
    assert (result["rows"], result["days"]) == (300, 4)
    assert "5 rows are left out: label is null" in printed
    why = {row["column"]: row["why"] for row in result["columns"]}
    assert "others are text such as 'unknown'" in why["price_now"]
    (tmp_path / "three.csv").write_text("user,label\n" + "\n".join(f"{i},{'abc'[i % 3]}" for i in range(90)))
    code, result, _ = run(command, "name=three", f"path={tmp_path}/three.csv", home=tmp_path / "home")
    assert result["error"] == (
        "label 'label': expected 0 and 1, got 'a' in 30 rows, 'b' in 30 rows, 'c' in 30 rows. "
        'Name the value that counts as 1: source.positive="a"; all others count as 0.'
    )


def test_columns_without_values_are_named_whatever_their_type(command, tmp_path):
    lines = "\n".join(f"{i * i % 7 % 2},{i % 30},{i * i * 37 % 101}.5,," for i in range(600))
    (tmp_path / "rows.csv").write_text(f"label,user,price,void,hollow\n{lines}\n")
    pq.write_table(csv.read_csv(tmp_path / "rows.csv"), tmp_path / "rows.parquet")
    for name in ("rows.csv", "rows.parquet"):
        code, result, printed = run(command, f"path={tmp_path}/{name}", home=tmp_path / name.replace(".", "_"))
        assert code == 0, printed
        assert "no values in any row, so left out: void, hollow" in result["notes"], name


REMEDIES: dict[str, tuple[str, str, list[Any], list[str], tuple[str, ...]]] = {
    "words": ("row,x,label\n", "{i},{x},{label}", ["<=50K", ">50K"], [], ("source.positive=\">50K\"",)),
    "three values": ("row,x,label\n", "{i},{x},{label}", ["a", "b", "c"], [], ("source.positive=\"b\"", "source.positive=\"a\"")),
    "days": ("row,x,day,label\n", "{i},{x},{day}/02/2025,{label}", [0, 1], ["day_column=day"], ("source.date_format=%d/%m/%Y",)),
    "no such label": ("row,x,clicked\n", "{i},{x},{label}", [0, 1], [], ("label=clicked", "features.label=clicked")),
}  # fmt: skip
"""Head and lines of a file, its labels, words of the command, and what is added to that very command."""


@pytest.mark.parametrize("name", REMEDIES)
def test_each_remedy_that_a_message_names_works_when_it_is_added_to_the_command(name, command, tmp_path):
    head, line, labels, words, remedies = REMEDIES[name]
    lines = [line.format(i=i, x=i % 11, day=1 + i % 28, label=labels[i % len(labels)]) for i in range(400)]
    (tmp_path / "rows.csv").write_text(head + "\n".join(lines) + "\n")
    given = [f"path={tmp_path}/rows.csv", *words]
    code, failed, _ = run(command, *given, home=tmp_path / "home")
    assert code == 1
    assert remedies[0].partition("=")[0] in failed["error"], failed["error"]
    for remedy in remedies:
        code, result, printed = run(command, *given, remedy, home=tmp_path / "home")
        assert code == 0, printed
        assert load(result["config_path"]).name == "rows"


def test_another_file_gets_another_name_and_the_same_file_its_own_again(command, tmp_path):
    for folder in ("a", "b"):
        lines = "\n".join(f"{i % 40},{int(i * i % 13 < 4)}" for i in range(300))
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "Clicks.csv").write_text(f"user,label\n{lines}\n")
    found = []
    for folder in ("a", "b", "a", "b"):
        code, result, printed = run(command, f"path={tmp_path}/{folder}/Clicks.csv", home=tmp_path / "home")
        assert code == 0, printed
        config = load(result["config_path"])
        found.append((config.name, config.source.path))
    assert found[:2] == found[2:] == [("clicks", f"{tmp_path}/a/Clicks.csv"), ("clicks_2", f"{tmp_path}/b/Clicks.csv")]


@pytest.mark.nightly
def test_trials_put_the_best_values_into_the_file(command, tmp_path):
    rows = pd.DataFrame({"user": [i % 40 for i in range(900)], "age": [float(i * i % 1_000) for i in range(900)]})
    rows["label"] = (rows.index * rows.index * 7 % 13 < 5).astype(int)
    rows["film"], rows["at"] = rows.index * 7 % 30, pd.Timestamp("2025-01-06") + pd.to_timedelta(rows.index, unit="h")
    rows.to_parquet(tmp_path / "rows.parquet")
    words = (
        "name=own",
        f"path={tmp_path}/rows.parquet",
        "day_column=at",
        "trials=2",
        "training.world_size=1",
        "training.epochs=2",
    )
    code, result, printed = run(command, *words, home=tmp_path / "home")
    assert (code, sum(result["sweep"]["trials"].values())) == (0, 2), printed
    config = load(result["config_path"]).model_dump()
    for key, value in result["sweep"]["best"]["params"].items():
        section, name = key.split(".")
        assert config[section][name] == pytest.approx(value)
    assert config["training"]["epochs"] == 2
    assert any(note.startswith("model and training: the best of 2 trials, NE ") for note in result["notes"])
    assert any(re.match(r"a history of each user has a .*NE.* with it, .* without", note) for note in result["notes"])


@pytest.mark.slow
def test_a_suggested_config_trains_unchanged(copied, smoke, tmp_path):
    """From the smoke run's table: no worse than the config that was written by hand."""
    found = suggest(config=CONFIG)
    assert found["looked_at"] == "table smoke"
    uses = {row["column"]: row["use"] for row in found["columns"]}
    assert all(uses[name] == "ignored" for name in ("impression_id", "session_id", "true_probability"))
    assert uses["event_time"] == "sparse", "the day column gives the hour"
    assert all(use == "sparse" for name, use in uses.items() if name.startswith(("cat_", "list_")))
    assert all(use == "dense" for name, use in uses.items() if name.startswith("num_"))
    result = train(config=found["config_path"])
    assert {one["name"] for one in result["baselines"]} == {"rate", "logistic", "boosting"}
    assert result["eval"]["ne"] < min(one["ne"] for one in result["baselines"]) + 0.02
    assert result["eval"]["ne"] < 1.0, "better than the base rate"
    assert result["eval"]["ne"] < smoke["eval"]["ne"] + 0.02
