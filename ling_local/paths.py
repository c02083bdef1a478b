"""Where files of ours live, and files that only their owner may read.

XDG variables are obeyed on every platform; an empty one counts as unset.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

APP = "ling"
DEMO = "ling-demo"  # the model in the package
PRIVATE_DIR_MODE = 0o700
PRIVATE_FILE_MODE = 0o600


def _place(variable: str, fallback: Path) -> Path:
    base = os.environ.get(variable, "").strip()
    return Path(base) / APP if base else fallback


def ensure_home() -> None:
    """Let a user without HOME and without an entry in the system's list live in /, as container runtimes do."""
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = os.sep


def user_path(text: str) -> Path:
    """A path as a person writes it: ~ is a home folder, except where it is nobody's."""
    return Path(os.path.expanduser(text))


def config_file() -> Path:
    """The settings file, `$XDG_CONFIG_HOME/ling/config.toml`."""
    return _place("XDG_CONFIG_HOME", platformdirs.user_config_path(APP)) / "config.toml"


def state_dir() -> Path:
    """History, sessions and traces of unexpected failures, `$XDG_STATE_HOME/ling`."""
    return _place("XDG_STATE_HOME", platformdirs.user_state_path(APP))


def cache_dir() -> Path:
    """What can be made again, such as compiled kernels, `$XDG_CACHE_HOME/ling`."""
    return _place("XDG_CACHE_HOME", platformdirs.user_cache_path(APP))


def models_dir() -> Path:
    """Checkpoint folders that are found by their name, `$XDG_DATA_HOME/ling/models`."""
    return _place("XDG_DATA_HOME", platformdirs.user_data_path(APP)) / "models"


def demo_dir() -> Path:
    """The small demo checkpoint that ships inside the package."""
    return Path(__file__).parent / "data" / "demo"


def hugging_face_cache() -> Path:
    """Where Hugging Face tools keep checkpoints: HF_HUB_CACHE, else HF_HOME/hub, else their default."""
    for variable, tail in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        base = os.environ.get(variable, "").strip()
        if base:
            return user_path(base) / tail
    return Path.home() / ".cache" / "huggingface" / "hub"


def make_private_dir(folder: Path) -> Path:
    """Create folder, and what is missing above it, readable by the owner only; tighten one that is loose."""
    folder.mkdir(mode=PRIVATE_DIR_MODE, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(PRIVATE_DIR_MODE)
    return folder


def open_private(file: Path, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> int:
    """Open a file of the person's words: 0600 from its first byte, a loose existing one is tightened first.

    Returns the file descriptor. Raises OSError.
    """
    make_private_dir(file.parent)
    descriptor = os.open(file, flags & ~os.O_TRUNC, PRIVATE_FILE_MODE)
    try:
        os.fchmod(descriptor, PRIVATE_FILE_MODE)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
