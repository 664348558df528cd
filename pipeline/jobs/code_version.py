"""Versions of the code and of its dependencies."""

import hashlib
import subprocess

from pipeline.config.files import ROOT


def read_commit() -> str:
    """Returns the commit, with `+` if the working tree has changes outside of docs; `unknown` outside git."""
    try:
        return _git("rev-parse", "HEAD")[:12] + ("+" if _git("status", "--porcelain", ":!docs") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hash_lock_file() -> str:
    """Returns the hash of the dependency lock file; `unknown` without one."""
    path = ROOT / "requirements" / "cpu.lock"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
