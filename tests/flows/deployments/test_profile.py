"""The Prefect profile of a home: what it says, who may read it, and what it leaves alone."""

import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.deployments.profile import leave_profile, write_profile
from flows.runtime.environment import read_profile

ADDRESS = "http://127.0.0.1:4321/api"


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "user" / "profiles.toml"
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(path))
    monkeypatch.delenv("PREFECT_PROFILE", raising=False)
    from prefect.settings import PREFECT_PROFILES_PATH, temporary_settings

    with temporary_settings({PREFECT_PROFILES_PATH: path}):
        yield path


def test_prefects_own_command_finds_the_server_in_a_new_shell(profiles, tmp_path):
    said = write_profile(tmp_path / ".dlrm", ADDRESS, "dlrm:secret")
    assert said == "the command prefect finds this server in any shell (profile dlrm)"
    bare = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    words = [str(Path(sys.executable).parent / "prefect"), "config", "view", "--show-secrets"]
    found = subprocess.run(
        words, env=bare | {"PREFECT_HOME": str(profiles.parent)}, capture_output=True, text=True, check=True
    ).stdout
    assert ADDRESS in found
    assert "dlrm:secret" in found


def test_others_cannot_read_it_even_where_they_could_before(profiles, tmp_path):
    profiles.parent.mkdir()
    profiles.write_text('active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://h/api"\n')
    profiles.chmod(0o644)
    write_profile(tmp_path / "team", ADDRESS, "dlrm:secret")
    assert stat.S_IMODE(profiles.stat().st_mode) == 0o600
    assert [path.name for path in profiles.parent.iterdir()] == ["profiles.toml"]


def test_a_profile_that_the_user_has_chosen_stays_active(profiles, tmp_path):
    profiles.parent.mkdir()
    profiles.write_text('active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://h/api"\n')
    said = write_profile(tmp_path / "team", ADDRESS, None)
    assert said == "the command prefect finds this server after `prefect profile use dlrm-team`; mine is active"
    content = tomllib.loads(profiles.read_text())
    assert content["active"] == "mine"
    assert content["profiles"]["mine"] == {"PREFECT_API_URL": "http://h/api"}
    assert content["profiles"]["dlrm-team"] == {"PREFECT_API_URL": ADDRESS}
    leave_profile(tmp_path / "team", ADDRESS)
    assert read_profile()[0] == "mine"


def test_a_later_server_replaces_it_and_its_end_leaves_it(profiles, tmp_path):
    home = tmp_path / ".dlrm"
    write_profile(home, "http://127.0.0.1:1/api", "old")
    write_profile(home, ADDRESS, None)
    assert read_profile() == ("dlrm", {"PREFECT_API_URL": ADDRESS})
    leave_profile(tmp_path / "other", ADDRESS)  # another home's server ends
    leave_profile(home, "http://127.0.0.1:1/api")  # or that of a home of the same name
    assert read_profile()[0] == "dlrm"
    leave_profile(home, ADDRESS)
    assert read_profile()[0] == "ephemeral"


def test_a_damaged_or_foreign_file_is_no_error(profiles, tmp_path):
    profiles.parent.mkdir()
    profiles.write_text("active = [")
    assert read_profile() == ("", {})
    assert "no profile for the command prefect" in write_profile(tmp_path, ADDRESS, None)
    assert profiles.read_text() == "active = ["


def test_our_own_commands_do_without_it(profiles, tmp_path):
    """Each finds the server of its own home. A profile would lead them to that of another, or to one that has ended."""
    write_profile(tmp_path / ".dlrm", ADDRESS, "dlrm:secret")
    code = "from flows.runtime.environment import set_environment as s; s(); from flows.runtime import access; print(access.server_address())"
    bare = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    for more, expected in (
        ({}, "None"),
        ({"PREFECT_PROFILE": "dlrm"}, ADDRESS),
        ({"PREFECT_API_URL": "http://x/api"}, "http://x/api"),
    ):
        done = subprocess.run([sys.executable, "-c", code], env=bare | more, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_a_user_without_a_home_has_no_profile(profiles, tmp_path, monkeypatch):
    """As in a container with a user of its own number."""

    def nowhere(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PREFECT_PROFILES_PATH")
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert read_profile() == ("", {})
    assert "Could not determine home directory" in write_profile(tmp_path, ADDRESS, None)


def test_any_name_of_a_home_is_one_of_a_profile(profiles, tmp_path):
    for name in ("my home.v2", 'a"b', "[x]", "ß"):
        write_profile(tmp_path / name, ADDRESS, "dlrm:secret")
        assert read_profile() == (
            f"dlrm-{name}",
            {"PREFECT_API_URL": ADDRESS, "PREFECT_API_AUTH_STRING": "dlrm:secret"},
        )
