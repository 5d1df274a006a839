"""What a run says at its end."""

from __future__ import annotations

from dataclasses import dataclass

from app.run.display import duration

PHASES = ("detect", "start", "import", "build", "join", "first merge")
"""From a fault to the first merged contribution, in order."""


@dataclass(frozen=True)
class Recovery:
    """How a fault was got over."""

    kind: str
    target: str
    phases: dict[str, float]
    """Seconds of each phase that is known, by the names of `PHASES`."""
    total_s: float | None
    """Fault to first merged contribution; None when it did not come before the end."""


@dataclass(frozen=True)
class Ending:
    """The result of a run, for people."""

    status: str
    tokens: int
    wall_s: float
    merges: int
    eval_loss_first: float | None
    eval_loss_final: float | None
    bits_per_byte: float | None
    gzip_bits_per_byte: float | None
    """What gzip -9 makes of the same held-out bytes."""
    recoveries: tuple[Recovery, ...]
    sample: str | None
    """Text that the trained model made."""
    folder: str


def final_report(ending: Ending) -> str:
    """Status, loss before and after, bits per byte beside gzip's, recoveries, a sample, where everything lies."""
    speed = ending.tokens / ending.wall_s if ending.wall_s > 0 else 0.0
    lines = [
        "",
        f"{ending.status}: {ending.tokens:,} tokens in {duration(ending.wall_s)} ({speed:,.0f} tokens/s), "
        f"{ending.merges} merges",
    ]
    if ending.eval_loss_first is not None and ending.eval_loss_final is not None:
        lines.append(f"eval loss: {ending.eval_loss_first:.3f} -> {ending.eval_loss_final:.3f} nats per token")
    if ending.bits_per_byte is not None:
        gzip = ending.gzip_bits_per_byte
        beside = "" if gzip is None else f" (gzip -9 on the same bytes: {gzip:.3f})"
        lines.append(f"held-out text: {ending.bits_per_byte:.3f} bits per byte{beside}")
    lines += [recovery_line(recovery) for recovery in ending.recoveries]
    if ending.sample is not None:
        lines += [
            "",
            "a sample from the trained model:",
            *(f"  | {line}" for line in ending.sample.splitlines()),
        ]
    lines += ["", *_places(ending)]
    return "\n".join(lines)


def recovery_line(recovery: Recovery) -> str:
    """One recovery with its phases, for example `recovered learner-1 (kill) in 6.1 s: detect 0.4, start 0.9, ...`."""
    who = f"{recovery.target} ({recovery.kind})"
    phases = ", ".join(f"{name} {recovery.phases[name]:.1f}" for name in PHASES if name in recovery.phases)
    if recovery.total_s is None:
        return f"not recovered: {who}" + (f"; {phases} s" if phases else "")
    return f"recovered: {who} in {recovery.total_s:.1f} s" + (f": {phases}" if phases else "")


def _places(ending: Ending) -> list[str]:
    root = ending.folder.rstrip("/")
    lines = [f"everything lies in {root}"]
    if ending.status == "completed":
        taken = "copied to a folder, for from_pretrained" if "://" in root else f"from_pretrained('{root}/model')"
        lines.append(f"  model/         {taken}")
    lines += [
        "  summary.json   the figures",
        "  events.jsonl   every event",
        "  checkpoints/   to go on from, with run.resume=auto",
    ]
    return lines
