"""The checkpoints that the authors of Ling publish: names, sizes, formats, and which of them ling reads."""

from __future__ import annotations

from dataclasses import dataclass

READABLE_FORMATS = ("bf16",)


@dataclass(frozen=True, slots=True)
class Published:
    """One published repository.

    name        the short name for `ling pull` and -m
    size_bytes  what its weights take on disk, about; 0 where nobody says
    draft_for   the repository whose drafter this is, "" for a model
    """

    name: str
    repo: str
    size_bytes: int
    format: str = "bf16"
    draft_for: str = ""

    @property
    def refusal(self) -> str:
        """Why ling cannot use it, or ""."""
        if self.format in READABLE_FORMATS:
            return ""
        return f"its weights are {self.format}; ling reads {' and '.join(READABLE_FORMATS)} so far"


_TINY, _FLASH = "inclusionAI/Ling-3.0-tiny", "inclusionAI/Ling-3.0-flash"
PUBLISHED = (
    Published("tiny", _TINY, 15_786_785_600),
    Published("flash", _FLASH, 254_972_811_200),
    Published("dspark", f"{_FLASH}-dspark", 2_727_415_810, draft_for=_FLASH),
    Published("fp8", f"{_FLASH}-fp8", 128_443_021_752, "fp8"),
    Published("int4", f"{_FLASH}-int4", 77_000_000_000, "int4"),
    Published("fp4", f"{_FLASH}-fp4", 70_400_000_000, "mxfp4"),
    Published("tiny-fp8", f"{_TINY}-fp8", 0, "fp8"),
    Published("tiny-int4", f"{_TINY}-int4", 0, "int4"),
)


def find_published(name: str) -> Published | None:
    """The published repository that name means: its short name, or the repository's in any usual spelling."""
    wanted = name.lower()
    return next((row for row in PUBLISHED if wanted == row.name or wanted in spellings(row.repo)), None)


def repository(name: str) -> str:
    """The repository that name stands for; a name that is not published stands for itself."""
    row = find_published(name)
    return row.repo if row else name


def spellings(name: str) -> tuple[str, ...]:
    """The names that mean this model: whole, without its owner, and with less and less in front."""
    lower = name.lower()
    short = lower.rpartition("/")[2]
    bare = short.removeprefix("ling-3.0-")
    return lower, short, *((f"ling-{bare}", bare) if bare != short else ())


def size_text(num_bytes: int) -> str:
    """A size as a person reads it, in powers of ten as disks are sold."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
