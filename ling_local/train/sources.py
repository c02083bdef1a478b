"""Where the demo model's text comes from: pinned packages, their licences, and how they are fetched.

Only licences that allow it: BSD, MIT, Apache-2.0, PSF. Packages come through pip and apt by name and version.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ling_local.errors import DownloadError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Source:
    """One pinned package. kind is wheel, sdist (for its documentation) or deb."""

    name: str
    version: str
    licence: str
    kind: str = "wheel"

    @property
    def requirement(self) -> str:
        return f"{self.name}={self.version}" if self.kind == "deb" else f"{self.name}=={self.version}"


# Whole packages that are never trained on: the strict held-out set.
UNSEEN = ("flask", "marshmallow")

_WHEELS = """
BSD-3-Clause: anyio:MIT=4.16.0 astropy=8.0.2 bokeh=3.9.2 boltons=26.2.0 CherryPy=18.10.0 dask=2026.8.0
BSD-3-Clause: distributed=2026.8.0 Django=5.2.19 djangorestframework=3.18.3 httpx=0.28.1 ipython=9.18.1
BSD-3-Clause: mne=1.13.2 networkx=3.6.1 numba=0.68.1 numpy=2.4.6 pandas=3.1.1 prompt_toolkit=3.0.53
BSD-3-Clause: pyglet=2.1.19 python-dateutil=4.0.0 scikit-image=0.26.0 scikit-learn=1.9.1 scipy=1.17.1
BSD-3-Clause: seaborn=0.13.2 statsmodels=0.15.0 sympy=1.14.0 toolz=1.2.0 traitlets=5.16.1 uvicorn=0.54.0
BSD-3-Clause: wagtail=8.0.1
MIT: alembic=1.20.1 beautifulsoup4=4.15.0 flake8=7.5.0 gunicorn=27.0.1 hydra-core=1.3.8 jedi=0.20.1
MIT: jsonschema=4.26.0 langchain-core=1.8.4 lark=1.3.1 libcst=1.9.0 loguru=0.7.3 manim=0.22.0
MIT: marshmallow=4.4.0 more-itertools=11.2.1 mypy=2.4.1 nibabel=5.4.2 parso=0.8.7 peewee=4.5.3 pip=26.3
MIT: poetry=2.5.1 pycodestyle=2.15.0 pyparsing=3.3.3 pytest=9.2.0 PyYAML=6.0.4 redis=8.1.0 sanic=25.12.1
MIT: setuptools=84.2.1 spacy=3.8.18 SQLAlchemy=2.1.9 sqlglot=30.30.0 structlog=26.1.0 textual=8.2.8
MIT: tomlkit=0.15.2 tox=4.67.15 trio=0.35.0 urllib3=2.8.0 virtualenv=21.15.11
Apache-2.0: aiohttp=3.14.5 apache-airflow-core=3.3.2 arrow=1.4.0 boto3=1.44.8 cryptography=50.0.2
Apache-2.0: Cython=3.3.1 docker=7.2.0 falcon=4.4.0 flax=0.12.8 homeassistant=2024.3.3 jax=0.10.2 keras=3.15.1
Apache-2.0: luigi=3.8.1 mlflow=3.18.0 moto=5.2.5 nltk=3.10.4 pymc=5.28.5 pytorch-lightning=2.6.6 qiskit=2.6.2
Apache-2.0: ray=2.60.0 requests=2.34.2 streamlit=1.67.0 transformers=5.24.0 xarray=2026.9.0 yapf=0.43.0
PSF-2.0: matplotlib=3.11.2
"""
_SDISTS = """
MIT: attrs=26.1.0 black=26.10.1 bottle=0.13.4 fastapi=0.165.0 isort=9.0.2 pydantic=2.14.4 rich=15.0.0
MIT: Twisted=26.10.0
BSD-3-Clause: celery=5.7.0 click=8.5.1 Flask=3.1.3 Jinja2=3.1.6 kombu=5.7.0 Scrapy=2.19.0 Sphinx=9.0.4
BSD-3-Clause: starlette=1.10.0 Werkzeug=3.1.9 Pygments=2.21.0
Apache-2.0: nox=2026.10.20 tornado=6.6.1
"""
# Build backends that pip needs to read an sdist's metadata without fetching anything else.
SDIST_BACKENDS = (
    "setuptools",
    "wheel",
    "flit_core",
    "hatchling",
    "hatch-vcs",
    "hatch-fancy-pypi-readme",
    "poetry-core",
)


def _parse(table: str, kind: str) -> tuple[Source, ...]:
    found = []
    for line in table.strip().splitlines():
        licence, names = line.split(": ", 1)
        for item in names.split():
            name, version = item.split("=")
            name, _, own = name.partition(":")
            found.append(Source(name, version, own or licence, kind))
    return tuple(found)


SOURCES: tuple[Source, ...] = (
    *_parse(_WHEELS, "wheel"),
    *_parse(_SDISTS, "sdist"),
    Source("python3.11-doc", "3.11.2-6+deb12u9", "PSF-2.0", "deb"),
    Source("python-django-doc", "3:3.2.25-0+deb12u7", "BSD-3-Clause", "deb"),
)


def canonical(name: str) -> str:
    """A package name as it compares: lower case, one kind of dash."""
    return name.lower().replace("_", "-").replace(".", "-")


def find_file(source: Source, work: Path) -> Path | None:
    """The downloaded file of a source under work/, or None."""
    for path in sorted((work / f"{source.kind}s").glob("*")):
        if source.kind == "deb":
            if path.name.startswith(f"{source.name}_"):
                return path
            continue
        stem = path.name.removesuffix(".tar.gz")
        name, _, rest = stem.partition("-") if source.kind == "wheel" else stem.rpartition("-")
        if canonical(name) == canonical(source.name) and rest.startswith(source.version):
            return path
    return None


def fetch(work: Path, say: Say) -> dict[Source, Path]:
    """Download what is not under work/ yet. Raises DownloadError naming the package."""
    found: dict[Source, Path] = {}
    for source in SOURCES:
        path = find_file(source, work)
        if path is None:
            say(f"fetching {source.requirement}")
            _download(source, work / f"{source.kind}s")
            path = find_file(source, work)
        if path is None:
            raise DownloadError(f"{source.requirement}: nothing was saved", "see the package manager's output")
        found[source] = path
    return found


def _download(source: Source, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", "."]
    command = {
        "wheel": [*pip, "--only-binary=:all:", source.requirement],
        "sdist": [*pip, "--no-build-isolation", "--no-binary=:all:", source.requirement],
        "deb": ["apt-get", "download", source.requirement],
    }[source.kind]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        hint = f"run: {' '.join(command)}"
        if source.kind == "sdist":
            hint += f" (needs {', '.join(SDIST_BACKENDS)} installed)"
        raise DownloadError(f"{source.requirement} cannot be fetched: {done.stderr.strip()[-300:]}", hint)
