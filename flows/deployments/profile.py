"""The Prefect profile of a home, with which the command `prefect` finds its server in any shell."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from flows.runtime.environment import PROFILE, is_own_profile, profiles_file
from pipeline.jobs.console import one_line

if TYPE_CHECKING:
    from prefect.settings import ProfilesCollection

FAULTS = (OSError, ValueError, RuntimeError)
"""Of a file of profiles that cannot be read or written; the last, of a user without a home."""
UNCHOSEN = (None, "ephemeral")
"""The active profile of a user who has chosen none."""


def profile_of(home: Path) -> str:
    """Returns the name of a home's profile.

    Example:
        >>> profile_of(Path("/data/.dlrm")), profile_of(Path("/data/team"))
        ('dlrm', 'dlrm-team')
    """
    return PROFILE if home.name == f".{PROFILE}" else f"{PROFILE}-{home.name}"


def write_profile(home: Path, address: str, secret: str | None) -> str:
    """Writes the profile of a home. It becomes the active one, unless the user has chosen another.

    Args:
        address: Of the server's API.
        secret: Its authentication string.
    Returns:
        A line that says how the command `prefect` finds the server.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, Profile, load_profiles

    name = profile_of(home)
    settings = {PREFECT_API_URL: address} | ({} if secret is None else {PREFECT_API_AUTH_STRING: secret})
    try:
        profiles = load_profiles()
        if name in profiles.names:
            profiles.remove_profile(name)
        profiles.add_profile(Profile(name=name, settings=settings))
        active = profiles.active_name
        if active in UNCHOSEN or is_own_profile(f"{active}"):
            profiles.set_active(active := name)
        _save(profiles)
    except FAULTS as error:
        return f"no profile for the command prefect: {one_line(error)}"
    if active == name:
        return f"the command prefect finds this server in any shell (profile {name})"
    return f"the command prefect finds this server after `prefect profile use {name}`; {active} is active"


def leave_profile(home: Path, address: str) -> None:
    """Makes the profile of a home inactive, when its server has ended, and it still is that server's."""
    from prefect.settings import PREFECT_API_URL, load_profiles

    try:
        profiles, name = load_profiles(), profile_of(home)
        if profiles.active_name == name and profiles[name].settings.get(PREFECT_API_URL) == address:
            profiles.set_active("ephemeral")
            _save(profiles)
    except FAULTS:
        pass  # the next server writes it again


def _save(profiles: "ProfilesCollection") -> None:
    """Replaces the file at once, readable by its owner alone: it has authentication strings."""
    from prefect.settings import PREFECT_PROFILES_PATH, save_profiles, temporary_settings

    path = profiles_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    os.close(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
    try:
        with temporary_settings({PREFECT_PROFILES_PATH: draft}):
            save_profiles(profiles)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
