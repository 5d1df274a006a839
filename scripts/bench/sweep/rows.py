"""The rows of the quality benchmark: every setting that is compared, and with which other one.

All rows train on the same data in steps of 32 samples in all: M learners take 32/M each. The core table costs 40 runs,
those that find the learning rates included; the other rows get half of its tokens, but for those that are `whole`.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.stepped_run import Schedule

SMALL = (
    "model.hidden=64",
    "model.heads=2",
    "model.intermediate=172",
    "data.tokenizer=bytes",
    "data.seq_len=64",
    "train.batch_size=8",
    "train.precision=fp32",
)
"""0.1 million parameters on bytes."""
LARGE = (*SMALL, "model.hidden=128", "model.heads=4", "model.intermediate=344", "model.layers=3")
"""0.6 million."""
SIZES = {"small": SMALL, "large": LARGE}
LRS = {"adamw": ("2e-3", "4e-3", "8e-3"), "muon": ("8e-3", "12e-3", "16e-3")}
LOWER = {"adamw": LRS["adamw"], "muon": ("6e-3", "8e-3", "12e-3")}
"""Of Muon, fewer learners, whose steps are larger, do better with less."""
HIGHER = {"adamw": ("16e-3",), "muon": ()}
"""Two learners with AdamW did best at the largest that the others try, so they try one more."""

INT4 = ("diloco.codec_up=int4", "diloco.codec_down=int4")
FP4 = ("diloco.codec_up=fp4", "diloco.codec_down=fp4")
BF16 = ("diloco.codec_up=bf16", "diloco.codec_down=bf16")
MIXED = (
    "+pools.slow.min_learners=1",
    "+pools.slow.slowdown=2",
    "+pools.slower.min_learners=1",
    "+pools.slower.slowdown=4",
)
"""Two of four learners are slow: one takes twice as long for a step, one four times."""
NETWORK = Schedule(delay_s=0.01, jitter_s=0.05, merge_s=0.02, adopt_on_arrival=True)
"""A step is 125 ms, a message takes 10 to 60 ms, a merge 20 ms."""
LOCKSTEP = Schedule()
HALF = "half of the tokens"
WHOLE_OUTER = (("0.8", "0.5"), ("0.7", "0.9"))
"""η and μ that are tried at the whole budget, with Muon."""
CORE_SEEDS = 3


@dataclass(frozen=True)
class Row:
    """One setting."""

    name: str
    overrides: tuple[str, ...] = ()
    optimizer: str = "muon"
    size: str = "small"
    data_parallel: bool = False
    schedule: Schedule = LOCKSTEP
    core: bool = False
    """Belongs to the core table: three seeds and the whole token budget. Others have one, and half of the tokens."""
    paired: bool = False
    """Has three seeds, though it does not belong to the core table."""
    whole: bool = False
    """Has the whole token budget, though it does not belong to the core table."""
    tune: bool = False
    """Tries all learning rates; a row that does not takes the best of the row it varies."""
    lower: bool = False
    """Tries lower learning rates than the others do."""
    higher: bool = False
    """Tries higher ones besides."""
    like: str = ""
    """The row that it varies, and is compared with seed by seed."""
    note: str = ""

    @property
    def share(self) -> float:
        """Of the token budget."""
        return 1.0 if self.core or self.whole else 0.5

    @property
    def lrs(self) -> tuple[str, ...]:
        """Learning rates to try."""
        usual = LOWER[self.optimizer] if self.lower else LRS[self.optimizer]
        return (*usual, *HIGHER[self.optimizer]) if self.higher else usual

    @property
    def seeds(self) -> int:
        """How many, unless the command line says so."""
        return CORE_SEEDS if self.core or self.paired else 1

    @property
    def baseline(self) -> str:
        """Data parallel with the same inner optimizer, model and tokens."""
        return _named(
            "data_parallel", self.optimizer, "" if self.share == 1.0 or self.size == "large" else "half", self.size
        )

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """Size, optimizer and what is special about the row."""
        return (*SIZES[self.size], f"train.optimizer={self.optimizer}", *self.overrides)


def _named(base: str, optimizer: str, end: str, size: str = "small") -> str:
    parts = [base, "muon" if optimizer == "muon" else "", end, "large" if size == "large" else ""]
    return "_".join(part for part in parts if part)


def _both(optimizer: str) -> list[Row]:
    """What is there with either inner optimizer: the core table, and the rows that others vary."""
    default = optimizer == "muon"
    data_parallel, half, averaged = (_named("data_parallel", optimizer, end) for end in ("", "half", "averaged"))
    ends = ("", "half", "int4", "int4_half", "fp4")
    plain, plain_half, int4, int4_half, fp4 = (_named("decoupled_m4", optimizer, end) for end in ends)
    m2 = _named("decoupled_m2", optimizer, "int4")
    two = ("learners=2", "train.batch_size=16", *INT4)
    one = ("diloco.average=0",)
    rows = [
        Row(data_parallel, one, optimizer, data_parallel=True, core=True, tune=True, lower=True),
        Row(int4, INT4, optimizer, core=True, tune=True, like=data_parallel),
        Row(m2, two, optimizer, core=True, tune=True, lower=True, higher=True, like=int4),
        Row(half, one, optimizer, data_parallel=True, tune=True, lower=True, like=data_parallel, note=HALF),
        Row(averaged, ("diloco.last_round=outer",), optimizer, data_parallel=True, like=half, note="Θ̄ of the weights"),
        Row(int4_half, INT4, optimizer, like=int4, note=HALF),
        Row(plain_half, (), optimizer, like=int4_half, note="fp32 both ways"),
        _killed(_named("decoupled_m4", optimizer, "int4_kill60"), int4_half, optimizer, 60.0, core=False),
        *_wider(8, optimizer, plain_half),
        *_wider(16, optimizer, plain_half),
    ]
    if default:
        rows += [
            Row(plain, (), optimizer, core=True, like=int4, note="fp32 both ways"),
            Row(fp4, FP4, optimizer, core=True, like=plain),
        ]
    kill30 = _named("decoupled_m4", optimizer, "int4_kill30")
    return [*rows, _killed(kill30, int4 if default else int4_half, optimizer, 30.0, core=default)]


def _killed(name: str, like: str, optimizer: str, every_s: float, core: bool) -> Row:
    schedule = Schedule(kill_every_s=every_s)
    every, away = every_s / schedule.step_s, schedule.away_s / schedule.step_s
    note = (
        f"a learner dies every {every:.0f} steps ({every_s:.0f} s) and is away for {away:.0f} ({schedule.away_s:.0f} s)"
    )
    return Row(name, INT4, optimizer, schedule=schedule, core=core, like=like, note=note)


def _wider(learners: int, optimizer: str, like: str) -> list[Row]:
    overrides = (f"learners={learners}", f"train.batch_size={32 // learners}")
    name = _named(f"decoupled_m{learners}", optimizer, "")
    mean = _named(f"decoupled_m{learners}", optimizer, "mean")
    return [
        Row(name, overrides, optimizer, tune=True, like=like),
        Row(mean, (*overrides, "diloco.merge=mean"), optimizer, tune=True, like=name),
    ]


def _ladder() -> list[Row]:
    """From synchronous DiLoCo to Decoupled DiLoCo, and the dials of the latter one at a time."""
    base = "decoupled_m4_muon"
    half = f"{base}_half"
    all_wait = ("diloco.blocking=true", "diloco.min_quorum=4")
    return [
        Row("diloco_muon", ("algo=diloco",), tune=True, like=half, note="synchronous, the whole model at once, mean"),
        Row("streaming_muon", ("algo=streaming",), tune=True, like=half, note="synchronous, fragments, mix, mean"),
        Row(f"{base}_bf16", BF16, like=half),
        Row(f"{base}_tau0", (*all_wait, "diloco.overlap_steps=0"), like=half, note="all wait for each merge"),
        Row(f"{base}_tau4", ("diloco.overlap_steps=4",), like=half),
        Row(f"{base}_mix", ("diloco.adopt=mix",), like=half),
        Row(f"{base}_overwrite", ("diloco.adopt=overwrite",), like=half),
        Row(f"{base}_overwrite_int4", ("diloco.adopt=overwrite", *INT4), like=f"{base}_int4_half"),
        Row(f"{base}_mean", ("diloco.merge=mean",), like=half),
        Row(f"{base}_last_outer", ("diloco.last_round=outer",), like=half, note="no mean in the last round"),
        Row(f"{base}_not_averaged", ("diloco.average=0",), like=half, note="Θ, not Θ̄"),
        Row(f"{base}_sgd", ("diloco.outer=sgd",), like=half),
        Row(f"{base}_h8", ("diloco.sync_interval=8", "diloco.overlap_steps=1"), like=half),
        Row("decoupled_m4_overwrite", ("diloco.adopt=overwrite",), "adamw", like="decoupled_m4_half"),
    ]


def _overwriting() -> list[Row]:
    """`overwrite` against the default `rebase`, seed by seed, at the whole budget: in fp32 and with int4 both ways."""
    rows = []
    for like, codec in (("decoupled_m4_muon", ()), ("decoupled_m4_muon_int4", INT4)):
        overrides = ("diloco.adopt=overwrite", *codec)
        name = f"{like.replace('_m4_muon', '_m4_muon_overwrite')}_whole"
        rows.append(Row(name, overrides, whole=True, paired=True, like=like, note="the whole budget"))
    return rows


def _mixed() -> list[Row]:
    """The pool of unequal learners, on a network: quorum, grace window and ring matter there."""
    name = "decoupled_mixed_muon"
    variants = {
        "gamma0": "diloco.grace_safety=0",
        "gamma04": "diloco.grace_safety=0.4",
        "k2": "diloco.min_quorum=2",
        "k4": "diloco.min_quorum=4",
        "r1": "diloco.ring_versions=1",
    }
    note = "two of four learners take 2 and 4 times as long for a step; messages take 10 to 60 ms, adopted on arrival"
    return [
        Row(name, MIXED, schedule=NETWORK, like="decoupled_m4_muon_half", note=note),
        *(Row(f"{name}_{end}", (*MIXED, dial), schedule=NETWORK, like=name) for end, dial in variants.items()),
    ]


def _borrowed() -> list[Row]:
    """More learners for the middle of the run: what it saves, and what it costs."""
    like, rows = "decoupled_m4_muon", []
    for borrowed in (4, 12):
        schedule = Schedule(borrowed=borrowed)
        share = f"{schedule.borrowed_from:.1%} to {schedule.borrowed_until:.1%}"
        note = f"from {share} of the tokens {borrowed} more learners"
        rows.append(Row(f"decoupled_m4_muon_borrowed{borrowed}", schedule=schedule, whole=True, like=like, note=note))
    return rows


def _outer() -> list[Row]:
    """η and μ against those of the rule; at the whole budget those that DiLoCo has, and those for the fewest rounds."""
    rows = []
    for lr, momentum in (("1.0", "0.0"), ("0.4", "0.6"), ("0.8", "0.5"), ("0.3", "0.8"), ("0.7", "0.9")):
        overrides = (f"diloco.outer_lr={lr}", f"diloco.outer_momentum={momentum}")
        for optimizer in ("adamw", "muon"):
            whole = optimizer == "muon" and (lr, momentum) in WHOLE_OUTER
            name = f"{_named('decoupled_m4', optimizer, '')}_outer_{lr}_{momentum}"
            like = _named("decoupled_m4", optimizer, "" if whole else "half")
            rows.append(Row(name, overrides, optimizer, whole=whole, like=like))
    return rows


def _large() -> list[Row]:
    """The second size: does the gap shrink? Each tries three learning rates, at half of the core table's tokens."""
    rows, note = [], f"0.6 M parameters, {HALF}"
    for optimizer in ("adamw", "muon"):
        data_parallel = _named("data_parallel", optimizer, "", "large")
        decoupled = _named("decoupled_m4", optimizer, "int4", "large")
        rows += [
            Row(
                data_parallel,
                ("diloco.average=0",),
                optimizer,
                "large",
                data_parallel=True,
                tune=True,
                lower=True,
                note=note,
            ),
            Row(decoupled, INT4, optimizer, "large", tune=True, like=data_parallel, note=note),
        ]
    return rows


ROWS = {
    row.name: row
    for row in [
        *_both("adamw"),
        *_both("muon"),
        *_ladder(),
        *_overwriting(),
        *_mixed(),
        *_borrowed(),
        *_outer(),
        *_large(),
    ]
}
