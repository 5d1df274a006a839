"""What must hold of any run, read from its tape and from the cluster."""

import contextlib
import re
from collections import Counter
from itertools import pairwise

import psutil
import ray
from ray.util import placement_group_table

from below import below

ACTOR = re.compile(
    r"ray::(.+:)?(Learner|Rank|Syncer|PairedSyncer|Supervisor|Ledger|StreamLedger|Evaluator|Rendezvous)\b"
)
"""Title that Ray gives an actor's process: ray::<name>:<class>.<method>."""


def pieces(merges):
    """(learner, incarnation, fragment) → what successive versions contain of it, in the order of the versions."""
    found = {}
    for merge in merges:
        for entry in merge["contains"]:
            assert (entry["version"], entry["round"]) == (merge["version"], merge["round"])
            found.setdefault((entry["learner"], entry["incarnation"], merge["fragment"]), []).append(entry)
    return found


def assert_no_work_counts_twice(merges):
    """Of each incarnation's work on a fragment, a version holds only what came after the version that held some."""
    for whose, entries in pieces(merges).items():
        for old, new in pairwise(entries):
            assert (new["epoch"], new["round"]) > (old["epoch"], old["round"]), whose
            assert old["version"] <= new["base"] < new["version"], whose
        assert all(entry["c_tokens"] > 0 for entry in entries), whose


def assert_every_sample_has_one_place(run, summary):
    """What the ledger counts as used is what versions say of each incarnation; the rest came back, none is lost."""
    samples = summary["samples"]
    assert samples["leased"] == 0
    assert samples["issued"] == samples["used"] + samples["returned"], samples
    frontier = Counter()
    for merge in (*run.events("merge"), *run.events("merge_recovered")):
        for entry in merge["contains"]:
            who = (entry["learner"], entry["incarnation"])
            frontier[who] = max(frontier[who], entry["samples"])
    assert samples["used"] == frontier.total() > 0, (samples, frontier)


def merged_tokens(merges, learner, incarnation):
    """The most tokens of one incarnation that versions of one fragment hold."""
    found = pieces(merges).items()
    sums = [sum(e["c_tokens"] for e in entries) for whose, entries in found if whose[:2] == (learner, incarnation)]
    return max(sums, default=0)


def processes(kind="", root=None):
    """Processes of any run's actors on the Ray that this process (or `root`) has started; of one class, if given."""
    found = []
    for process in below(root):
        with contextlib.suppress(psutil.Error):
            title = ACTOR.match(" ".join(process.cmdline()))
            if title and kind in ("", title[2]):
                found.append(process)
    return found


def remains(spec, root=None):
    """What is left of a run in the cluster: actors, placement groups, processes."""
    groups = {spec.group_name(learner) for learner in spec.config.learner_ids}
    return [
        *[actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == spec.namespace],
        *[e for e in placement_group_table().values() if e["name"] in groups and e["state"] != "REMOVED"],
        *processes(root=root),
    ]
