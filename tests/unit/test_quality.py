"""The quality benchmark: which runs it makes, how it knows them again, and its statistics."""

import json
import sys

import pytest

import quality
from sweep.figures import compared, figures, table
from sweep.report import BEGIN, END, draw, write_table
from sweep.results import ACTORS, OF_DATA_PARALLEL, Job, Results, tuned
from sweep.rows import CORE_SEEDS, HALF, ROWS

TOKENS = 1000


def line(row: str, lr: str, seed: int, loss: float, **changes: object) -> dict[str, object]:
    job = Job(row, lr, seed, TOKENS)
    fate = {"tokens": 1000, "merges": 7, "discarded_share": 0.25, "contributors": 3.5, "virtual_s": 4.0, "seconds": 1.0}
    return {"row": row, "settings": job.settings | changes, "loss": loss} | fate


def results_with(path, *lines):
    results = Results(path)
    for each in lines:
        results.add(each)
    return Results(path)  # as they come back from the file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "docs" / "quality.jsonl"


@pytest.mark.parametrize("name", sorted({row.overrides: row.name for row in ROWS.values()}.values()))
def test_every_row_has_a_configuration(name: str):
    row = ROWS[name]
    assert Job(name, row.lrs[0], 0, TOKENS).settings["train.lr"] == float(row.lrs[0])


def test_every_row_has_rows_to_compare_with_and_none_is_there_twice():
    for row in ROWS.values():
        assert ROWS[row.baseline].data_parallel
        assert tuned(ROWS[row.baseline]).data_parallel
        assert ROWS[row.baseline].share == row.share
        assert row.like in ROWS or row.data_parallel
        assert ROWS[row.like or row.name].share >= row.share
        assert len(tuned(row).lrs) >= 3
    assert len({(row.all_overrides, row.schedule, row.data_parallel, row.share) for row in ROWS.values()}) == len(ROWS)


def test_the_core_table_costs_forty_runs_at_most():
    core = [row for row in ROWS.values() if row.core]
    learning_rates = {(tuned(row).name, lr) for row in core for lr in tuned(row).lrs}
    other_seeds = sum(CORE_SEEDS - 1 for row in core)
    first_seeds = sum(not row.tune for row in core)
    assert len(learning_rates) + other_seeds + first_seeds <= 40


def test_a_finished_run_is_known_by_its_settings(path):
    results = results_with(path, line("decoupled_m4_muon", "12e-3", 0, 2.0))
    assert results.of(Job("decoupled_m4_muon", "12e-3", 0, TOKENS))["loss"] == 2.0
    for other in (
        Job("decoupled_m4_muon", "16e-3", 0, TOKENS),
        Job("decoupled_m4_muon", "12e-3", 1, TOKENS),
        Job("decoupled_m4_muon", "12e-3", 0, 2 * TOKENS),
        Job("decoupled_m4_muon_int4", "12e-3", 0, TOKENS),
        Job("decoupled_m4_muon_int4_kill30", "12e-3", 0, TOKENS),
        Job("decoupled_mixed_muon", "12e-3", 0, TOKENS),
        Job("data_parallel_muon", "12e-3", 0, TOKENS),
    ):
        assert results.of(other) is None


def test_what_a_run_does_not_use_does_not_make_it_another(path):
    settings = Job("data_parallel", "4e-3", 0, TOKENS).settings
    assert "train.muon_momentum" not in settings
    assert {key for key in settings if key.startswith("diloco.")} == set(OF_DATA_PARALLEL)
    assert "train.muon_momentum" in Job("data_parallel_muon", "16e-3", 0, TOKENS).settings
    assert "diloco.outer_lr" in Job("decoupled_m4_muon", "12e-3", 0, TOKENS).settings


def test_a_run_under_another_name_is_the_same_run(path):
    known = line("decoupled_m4_muon", "12e-3", 0, 2.0) | {"row": "an_old_name"}
    assert results_with(path, known).of(Job("decoupled_m4_muon", "12e-3", 0, TOKENS)) is not None


def test_a_setting_that_did_not_exist_counts_as_its_default(path):
    known = line("decoupled_m4_muon", "12e-3", 0, 2.0)
    for key in ("schedule.kill_every_s", "schedule.step_s", "diloco.blocking", "pools"):
        del known["settings"][key]
    results = results_with(path, known)
    assert results.of(Job("decoupled_m4_muon", "12e-3", 0, TOKENS)) is not None
    unlike = line("decoupled_m4_muon_int4_kill30", "12e-3", 0, 2.0)
    del unlike["settings"]["schedule.kill_every_s"]
    assert results_with(path, unlike).of(Job("decoupled_m4_muon_int4_kill30", "12e-3", 0, TOKENS)) is None


def test_a_run_by_the_actors_is_another_one(path):
    results = results_with(path, line("decoupled_m4_muon_int4", "12e-3", 0, 2.0) | {"how": ACTORS})
    job = Job("decoupled_m4_muon_int4", "12e-3", 0, TOKENS)
    assert results.of(job) is None
    assert results.of(job, ACTORS) is not None


def test_each_row_goes_on_at_the_best_of_all_its_learning_rates(path):
    tried = [line("decoupled_m4_muon_int4", lr, 0, loss) for lr, loss in (("8e-3", 2.2), ("12e-3", 2.0))]
    assert results_with(path, *tried).best_lr(ROWS["decoupled_m4_muon_int4"], TOKENS) is None
    assert results_with(path).jobs_of(ROWS["decoupled_m4_muon_int4"], None, TOKENS) == []
    results = results_with(path, line("decoupled_m4_muon_int4", "16e-3", 0, 2.1))
    assert results.best_lr(ROWS["decoupled_m4_muon_int4"], TOKENS) == "12e-3"
    seeds = [(job.lr, job.seed) for job in results.jobs_of(ROWS["decoupled_m4_muon_int4"], None, TOKENS)]
    assert seeds == [("12e-3", 0), ("12e-3", 1), ("12e-3", 2)]
    # The kill varies int4, and so does fp32, which the mean varies.
    assert results.best_lr(ROWS["decoupled_m4_muon_int4_kill30"], TOKENS) == "12e-3"
    assert len(results.jobs_of(ROWS["decoupled_m4_muon_mean"], None, TOKENS)) == 1


@pytest.mark.parametrize("diverged", [float("nan"), float("inf")])
def test_a_learning_rate_that_diverged_is_not_the_best(path, diverged):
    tried = [
        line("decoupled_m4_muon_int4", lr, 0, loss) for lr, loss in (("8e-3", diverged), ("12e-3", 2.0), ("16e-3", 2.1))
    ]
    assert results_with(path, *tried).best_lr(ROWS["decoupled_m4_muon_int4"], TOKENS) == "12e-3"


def test_more_seeds_than_the_core_has_are_all_compared(path):
    pair = ("data_parallel_muon", "decoupled_m4_muon_int4")
    tried = [line(row, lr, 0, 2.0 if lr == "8e-3" else 3.0) for row in pair for lr in ROWS[row].lrs]
    for seed in range(1, 5):
        tried += [
            line("data_parallel_muon", "8e-3", seed, 2.0),
            line("decoupled_m4_muon_int4", "8e-3", seed, 2.0 + 0.01 * seed),
        ]
    found = figures(results_with(path, *tried), ROWS["decoupled_m4_muon_int4"], 5, TOKENS)
    assert found["gap_percent"] == pytest.approx(1.0)  # of 0, 0.5, 1, 1.5 and 2
    assert len(found["losses"]) == 5


@pytest.mark.parametrize(
    "wrong", [["--tokens", "-5"], ["--seeds", "0"], ["--rows", "nosuch"], ["--report", "--core"], ["--report"]]
)
def test_wrong_options_are_one_line_and_write_nothing(wrong, monkeypatch, capsys):
    page = quality.PAGE.read_bytes()
    monkeypatch.setattr(sys, "argv", ["quality.py", *wrong, *(["--tokens", "1"] if wrong == ["--report"] else [])])
    try:
        code = quality.main()
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert wrong[0] in err.splitlines()[-1]
    assert quality.PAGE.read_bytes() == page


def test_differences_are_paired_by_seed():
    mean, error = compared({0: 2.02, 1: 2.04, 2: 2.03, 5: 9.0}, {2: 2.0, 1: 2.0, 0: 2.0, 7: 1.0})
    # Differences of 1, 2 and 1.5%: mean 1.5, standard deviation 0.5, error 0.5/√3.
    assert mean == pytest.approx(1.5)
    assert error == pytest.approx(0.2886751)
    assert compared({0: 3.0}, {0: 2.0}) == (pytest.approx(50.0), None)
    assert compared({0: 3.0}, {1: 2.0}) == (None, None)


def some_results(path) -> Results:
    baseline = [
        line("data_parallel_muon", lr, 0, 2.0 if lr == "12e-3" else 3.0) for lr in ROWS["data_parallel_muon"].lrs
    ]
    int4 = [
        line("decoupled_m4_muon_int4", lr, 0, 2.2 if lr == "16e-3" else 3.0)
        for lr in ROWS["decoupled_m4_muon_int4"].lrs
    ]
    seeds = [line("data_parallel_muon", "12e-3", 1, 1.6), line("decoupled_m4_muon_int4", "16e-3", 1, 1.6)]
    plain = [line("decoupled_m4_muon", "16e-3", 0, 2.2 * 1.01), line("decoupled_m4_muon", "16e-3", 1, 1.6 * 1.03)]
    return results_with(path, *baseline, *int4, *seeds, *plain)


def test_figures_of_a_row(path):
    found = figures(some_results(path), ROWS["decoupled_m4_muon"], None, TOKENS)
    assert found["losses"] == {0: pytest.approx(2.222), 1: pytest.approx(1.648)}
    assert (found["lr"], found["lr_at_edge"]) == ("16e-3", True)
    assert found["gap_percent"] == pytest.approx((11.1 + 3.0) / 2)
    assert found["gap_error"] == pytest.approx(abs(11.1 - 3.0) / 2)
    assert (found["like"], found["against_percent"]) == ("decoupled_m4_muon_int4", pytest.approx(2.0))
    assert found["against_error"] == pytest.approx(1.0)
    assert (found["tokens"], found["merges"], found["contributors"]) == (1000, 7, 3.5)
    assert (found["discarded_share"], found["tokens_per_s"]) == (0.25, 250.0)
    assert figures(some_results(path), ROWS["decoupled_m4_muon_fp4"], None, TOKENS) is None


def tried(row: str, best: str) -> list[dict[str, object]]:
    """One run of each learning rate, one of them the best."""
    share = ROWS[row].share
    lines = []
    for lr in ROWS[row].lrs:
        job = Job(row, lr, 0, int(TOKENS * share))
        lines.append(line(row, lr, 0, 2.0 if lr == best else 3.0) | {"settings": job.settings})
    return lines


@pytest.mark.parametrize("name", [row.name for row in ROWS.values() if tuned(row).lrs != row.lrs or row.tune])
def test_a_best_learning_rate_at_the_edge_has_a_star(name, path):
    """Also of a row that takes it from one that tried others."""
    source = tuned(ROWS[name])
    for best in source.lrs:
        path.unlink(missing_ok=True)
        own = Job(name, best, 0, int(TOKENS * ROWS[name].share))
        results = results_with(path, *tried(source.name, best), line(name, best, 0, 2.0) | {"settings": own.settings})
        found = figures(results, ROWS[name], 1, TOKENS)
        assert (found["lr"], found["lr_at_edge"]) == (best, best in (source.lrs[0], source.lrs[-1]))
        assert f"| {name} | {best}{'*' if found['lr_at_edge'] else ''} |" in table({name: found})


def test_what_others_are_compared_with_is_tuned_by_itself():
    for name in ("data_parallel_half", "data_parallel_muon_half", "diloco_muon", "streaming_muon"):
        assert ROWS[name].tune
    for learners in (8, 16):
        for end in ("", "_mean", "_muon", "_muon_mean"):
            assert ROWS[f"decoupled_m{learners}{end}"].tune
    assert ROWS["decoupled_m2_int4"].lrs == ("2e-3", "4e-3", "8e-3", "16e-3")
    assert all(row.tune and len(row.lrs) == 3 and HALF in row.note for row in ROWS.values() if row.size == "large")


@pytest.mark.parametrize("codec", ["", "_int4"])
def test_rebase_is_compared_with_overwrite_seed_by_seed_at_the_whole_budget(codec):
    row, like = ROWS[f"decoupled_m4_muon_overwrite{codec}_whole"], ROWS[f"decoupled_m4_muon{codec}"]
    assert (row.like, row.share, row.seeds, like.share, like.seeds) == (like.name, 1.0, CORE_SEEDS, 1.0, CORE_SEEDS)
    settings, others = (Job(each.name, "12e-3", 0, TOKENS).settings for each in (row, like))
    assert {key for key in settings if settings[key] != others[key]} == {"diloco.adopt"}


def test_the_finished_runs_of_the_page_are_known():
    """A setting that comes later, or a row that is tuned by itself, must not make them strangers."""
    results = Results(quality.RESULTS)
    for row, lr in (("data_parallel", "4e-3"), ("data_parallel_muon", "8e-3"), ("decoupled_m4_muon_int4", "12e-3")):
        assert all(results.of(Job(row, lr, seed, quality.TOKENS)) for seed in range(CORE_SEEDS))
    for row in ("decoupled_m8_muon", "decoupled_m16_muon_mean", "diloco_muon", "decoupled_m4_muon_overwrite_int4"):
        assert results.of(Job(row, "12e-3", 0, quality.TOKENS // 2))
    assert all(results.of(Job("data_parallel_half", lr, 0, quality.TOKENS // 2)) for lr in ("2e-3", "4e-3", "8e-3"))


def test_the_page_says_which_rows_ran_by_the_actors_too():
    lines = [json.loads(line) for line in quality.RESULTS.read_text().splitlines()]
    rows = sorted({line["row"] for line in lines if line.get("how") == ACTORS})
    told = ", ".join(f"`{row}`" for row in rows) or "none yet"
    assert f"Results by the real actors as well: {told}." in " ".join(quality.PAGE.read_text().split())


def test_the_report_keeps_what_is_written_around_the_table(path, tmp_path):
    names = ("data_parallel_muon", "decoupled_m4_muon_int4", "decoupled_m4_muon")
    found = {name: figures(some_results(path), ROWS[name], None, TOKENS) for name in names}
    page, picture = tmp_path / "quality.md", tmp_path / "img" / "quality.png"
    page.write_text(f"# Ours\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    write_table(page, found, "Some rows.")
    text = page.read_text()
    assert text.startswith(f"# Ours\n\nBefore.\n\n{BEGIN}\nSome rows.\n\n| row |")
    assert text.endswith(f"{END}\n\nAfter.\n")
    assert "old" not in text
    line = "| decoupled_m4_muon | 16e-3* | 0.00 M | 1.9350 ± 0.4059 | 2 | +7.05% ± 4.05 | "
    assert f"{line}+2.00% ± 1.00 decoupled_m4_muon_int4 |" in text
    assert table(found) in text
    write_table(page, found, "Some rows.")
    assert page.read_text() == text
    draw(picture, found, "Some rows")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_row_beside_the_core_table_has_half_of_the_tokens_at_the_learning_rate_of_the_whole(path):
    tried = [
        line("decoupled_m4_muon_int4", lr, 0, loss) for lr, loss in (("8e-3", 2.2), ("12e-3", 2.0), ("16e-3", 2.1))
    ]
    results = results_with(path, *tried)
    half = ROWS["decoupled_m4_muon_int4_half"]
    assert results.jobs_of(half, None, TOKENS) == [Job(half.name, "12e-3", 0, TOKENS // 2)]
    assert figures(results, half, None, TOKENS) is None  # the whole run is not its run
