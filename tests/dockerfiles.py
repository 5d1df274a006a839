"""Reads the Dockerfiles and .dockerignore of this project as `docker build` does, as far as these go."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
IMAGES = ("cpu", "cuda")
PINS = DOCKER / "requirements.txt"


@dataclass(frozen=True)
class Step:
    """One instruction."""

    name: str
    text: str

    @property
    def copied(self) -> tuple[str, str]:
        """Source and target of a COPY."""
        source, target = [word for word in self.text.split() if not word.startswith("--")]
        return source, target

    @property
    def variables(self) -> dict[str, str]:
        """Names and values of an ENV or ARG."""
        return dict(word.split("=", 1) for word in shlex.split(self.text))


def steps(image: str) -> list[Step]:
    """The instructions of an image's Dockerfile."""
    lines = (DOCKER / f"{image}.Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    logical = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Step(*line.split(maxsplit=1)) for line in logical if line]


def _pattern(text: str) -> re.Pattern[str]:
    """A line of .dockerignore: what it matches, and all below."""
    parts = re.split(r"(\*\*/|\*)", text)
    meant = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return re.compile("".join(meant.get(part, re.escape(part)) for part in parts) + "(?:/.*)?")


def context(root: Path) -> set[str]:
    """Files under a folder that this project's .dockerignore lets into a build; of several lines the last counts."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    patterns = [(not rule.startswith("!"), _pattern(rule.removeprefix("!"))) for rule in rules]
    tops = {rule[1:].partition("/")[0] for rule in rules if rule.startswith("!")}
    assert rules[0] == "*", "all else at the top need not be walked"
    sent = set()
    for path in (path for top in tops for path in (root / top).rglob("*")):
        name = path.relative_to(root).as_posix()
        left_out = False
        for leaves_out, pattern in patterns:
            if pattern.fullmatch(name):
                left_out = leaves_out
        if path.is_file() and not left_out:
            sent.add(name)
    return sent


def below(name: str, source: str) -> bool:
    """Whether a file is the source of a COPY, or in it."""
    return PurePosixPath(name).is_relative_to(source)
