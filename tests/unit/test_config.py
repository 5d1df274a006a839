"""Every wrong setting is refused with one line: the key, the value, what is allowed."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.config import (
    Config,
    ConfigError,
    Fault,
    PoolConfig,
    SyncerConfig,
    as_yaml,
    check,
    check_fragments,
    describe,
    from_yaml,
    load,
)
from app.config.help import field_docs, known_keys
from app.config.limits import check_limits
from app.diloco.settings import DilocoSettings

REFUSED = [
    # override(s), key, part of what is allowed
    (["diloco.min_quorum=5"], "diloco.min_quorum=5", "1 to learners=4"),
    (["diloco.min_quorum=0"], "diloco.min_quorum=0", "1 to learners=4"),
    (["learners=0"], "learners=0", "at least 1"),
    (["learners=two"], "learners=two", "whole number"),
    (["learners=2.5"], "learners=2.5", "whole number"),
    (["learners=true"], "learners=true", "whole number"),
    (["learners="], "learners=", "whole number"),
    (["+learners=3"], "+learners=3", "learners=3, without +"),
    (["+model.hidden=32"], "+model.hidden=32", "model.hidden=32, without +"),
    (["+model=tiny"], "+model=tiny", "model=tiny, without +"),
    (["++model=tiny"], "++model=tiny", "model=tiny, without +"),
    (["model@other=tiny"], "model@other=tiny", "without @"),
    (["+model@other=tiny"], "+model@other=tiny", "without @"),
    (["learners=100000000000000000000"], "learners=100000000000000000000", "at most 4,096"),
    (["learners=4097"], "learners=4097", "at most 4,096"),
    (["train.tokens=10000000000000000"], "train.tokens=10000000000000000", "at most 9,007,199,254,740,992"),
    (["diloco.ring_versions=1000000"], "diloco.ring_versions=1000000", "at most 1,024"),
    (["train.batch_size=2000000"], "train.batch_size=2000000", "at most 1,048,576"),
    (
        ["train.batch_size=100000", "data.seq_len=1024"],
        "train.batch_size=100000",
        "at most 16,384 with data.seq_len=1024",
    ),
    (["eval.batch_size=1000000"], "eval.batch_size=1000000", "at most 131,072 with data.seq_len=128"),
    (["supervisor.linger_s=1e10"], "supervisor.linger_s=10000000000.0", "at most 1,000,000,000"),
    (["pools.local.cpus_per_worker=100000"], "pools.local.cpus_per_worker=100000", "at most 65,536"),
    (["pools.local.batch_size=1000000"], "pools.local.batch_size=1000000", "131,072 with data.seq_len=128"),
    (["chaos.faults=[{target: learner-0, seconds: 1e12}]"], "chaos.faults[0].seconds=1000000000000.0", "at most"),
    (["learners=1,2"], "learners=1,2", "one value"),
    (["~learners"], "~learners=", "key=value"),
    (["min_lerners=2"], "min_lerners=2", "learners"),
    (["fragments=2"], "fragments=2", "diloco.fragments"),
    (["diloco.fragmnts=2"], "diloco.fragmnts=2", "diloco.fragments"),
    (["+nothing.like.it=2"], "nothing.like.it=2", "--help"),
    (["hydra.verbose=true"], "hydra.verbose=true", "no such key"),
    (["run=5"], "run=5", "no such key"),
    (["just words"], "override=just words", "key=value"),
    (["--verbose"], "override=--verbose", "key=value"),
    (["train.tokens=[1"], "train.tokens=[1", "key=value"),
    (["model=gigantic"], "model=gigantic", "hf, micro, tiny"),
    (["model=[tiny,micro]"], "model=[tiny,micro]", "hf, micro, tiny"),
    (["model.name=gpt"], "model.name=gpt", "llama, hf"),
    (["model.hidden=36"], "model.hidden=36", "multiple of 8"),
    (["model.heads=0"], "model.heads=0", "at least 1"),
    (["model.layers=null"], "model.layers=null", "whole number"),
    (["model=hf"], "model.path=null", "folder or a hub name"),
    (["model=hf", "model.path=/nowhere/at/all"], "model.path=/nowhere/at/all", "no such file"),
    (["data=files"], "data.path=null", "is needed"),
    (["data=files", "data.path=missing.txt"], "data.path=missing.txt", "no such file"),
    (["data=hub"], "data.hub_name=null", "is needed"),
    (["data.source=web"], "data.source=web", "stdlib, files, hub"),
    (["data.tokenizer=./nowhere"], "data.tokenizer=./nowhere", "no such file"),
    (["data.vocab=256"], "data.vocab=256", "at least 257"),
    (["data.heldout_share=0"], "data.heldout_share=0", "more than 0"),
    (["data.heldout_share=1"], "data.heldout_share=1", "less than 1"),
    (["data.max_bytes=lots"], "data.max_bytes=lots", "whole number or null"),
    (["data.max_bytes=0"], "data.max_bytes=0", "at least 1"),
    (["data.seq_len=1"], "data.seq_len=1", "at least 2"),
    (["train.tokens=-5"], "train.tokens=-5", "at least 1"),
    (["train.tokens=1e6"], "train.tokens=1e6", "whole number"),
    (["train.lr=0"], "train.lr=0", "more than 0"),
    (["train.lr=nan"], "train.lr=nan", "finite"),
    (["train.weight_decay=inf"], "train.weight_decay=inf", "finite"),
    (["train.batch_size=0"], "train.batch_size=0", "at least 1"),
    (["train.accumulation=0"], "train.accumulation=0", "at least 1"),
    (["train.beta2=1"], "train.beta2=1", "less than 1"),
    (["train.min_lr_share=1.5"], "train.min_lr_share=1.5", "0 to 1"),
    (["train.precision=fp16"], "train.precision=fp16", "auto, fp32, bf16"),
    (["diloco.fragments=0"], "diloco.fragments=0", "1 to diloco.sync_interval=24"),
    (["diloco.fragments=25"], "diloco.fragments=25", "1 to diloco.sync_interval=24"),
    (["diloco.sync_interval=0"], "diloco.sync_interval=0", "at least 1"),
    (["diloco.overlap_steps=0"], "diloco.overlap_steps=0", "1 to diloco.sync_interval=24"),
    (["diloco.blocking=true", "diloco.overlap_steps=-1"], "diloco.overlap_steps=-1", "0 to diloco.sync_interval=24"),
    (["algo=diloco", "diloco.overlap_steps=2"], "diloco.overlap_steps=2", "0 is needed when algo=diloco"),
    (["algo=diloco", "diloco.fragments=8"], "diloco.fragments=8", "1 is needed when algo=diloco"),
    (["algo=diloco", "diloco.blocking=false"], "diloco.blocking=false", "true is needed when algo=diloco"),
    (["algo=diloco", "diloco.min_quorum=1"], "diloco.min_quorum=1", "learners=4 is needed when algo=diloco"),
    (["algo=diloco", "pools.local.max_learners=8"], "pools.local.max_learners=8", "at most 4: algo=diloco"),
    (["algo=streaming", "diloco.blocking=false"], "diloco.blocking=false", "true is needed when algo=streaming"),
    (["algo=streaming", "diloco.min_quorum=3"], "diloco.min_quorum=3", "learners=4 is needed when algo=streaming"),
    (["algo=streaming", "pools.local.max_learners=5"], "pools.local.max_learners=5", "at most 4: algo=streaming"),
    (["train.elastic=true"], "train.elastic=true", "false is needed when algo=decoupled"),
    (["algo=streaming", "train.elastic=true"], "train.elastic=true", "false is needed when algo=streaming"),
    (["algo=sgd"], "algo=sgd", "data_parallel, decoupled, diloco, streaming"),
    (["algo=data_parallel", "diloco.adopt=mix"], "diloco.adopt=mix", "keep is needed"),
    (["algo=data_parallel", "diloco.outer_lr=0.5"], "diloco.outer_lr=0.5", "1.0 is needed"),
    (["algo=data_parallel", "diloco.codec_up=int4"], "diloco.codec_up=int4", "fp32 is needed"),
    (["algo=data_parallel", "diloco.guard_z=8"], "diloco.guard_z=8.0", "0.0 is needed"),
    (["algo=data_parallel", "diloco.last_round=mean"], "diloco.last_round=mean", "outer is needed"),
    (["diloco.adopt=keep"], "diloco.adopt=keep", "rebase, overwrite or mix is needed"),
    (["diloco.overlap_steps=25"], "diloco.overlap_steps=25", "1 to diloco.sync_interval=24"),
    (["diloco.grace_safety=1.1"], "diloco.grace_safety=1.1", "0 to 1"),
    (["diloco.ring_versions=0"], "diloco.ring_versions=0", "at least 1"),
    (["diloco.codec_up=int2"], "diloco.codec_up=int2", "fp32, bf16, int8, int4, fp4"),
    (["diloco.codec_down=e3m0"], "diloco.codec_down=e3m0", "fp32, bf16, int8, int4, fp4"),
    (["diloco.codec_block=48"], "diloco.codec_block=48", "power of two from 16 to 4096"),
    (["diloco.codec_block=8"], "diloco.codec_block=8", "power of two from 16 to 4096"),
    (["diloco.codec_block=big"], "diloco.codec_block=big", "whole number"),
    (["diloco.error_feedback=true", "diloco.adopt=rebase"], "diloco.error_feedback=true", "adopt=rebase"),
    (
        ["diloco.error_feedback=true", "diloco.adopt=mix"],
        "diloco.error_feedback=true",
        "false is needed when diloco.codec_up=fp32",
    ),
    (["diloco.adopt=copy"], "diloco.adopt=copy", "overwrite, mix, rebase, keep"),
    (["diloco.late=never"], "diloco.late=never", "discard, merge"),
    (["diloco.mix_alpha=-0.1"], "diloco.mix_alpha=-0.1", "0 to 1"),
    (["diloco.outer_lr=0"], "diloco.outer_lr=0", "more than 0"),
    (["diloco.outer_momentum=1"], "diloco.outer_momentum=1", "less than 1"),
    (["run.resume=maybe"], "run.resume=maybe", "never, auto"),
    (["run.name=a/b"], "run.name=a/b", "without slashes"),
    (["run.name=''"], "run.name=", "without slashes"),
    (["run.shared_dir=perhaps"], "run.shared_dir=perhaps", "true or false"),
    (["chaos=kill_one", "learners=1"], "chaos.faults[0].target=learner-1", "learner-0"),
    (
        ["chaos=kill_one", "learners=1", "diloco.min_quorum=1"],
        "chaos.faults[0].target=learner-1",
        "learner-0",
    ),
    (["chaos.faults=[{kind: explode}]"], "chaos.faults[0].kind=explode", "kill, kill_worker, freeze"),
    (["chaos.faults=[{target: learner-0, at: 2}]"], "chaos.faults[0].at=2", "0 to 1"),
    (["chaos.faults=[{when: 1}]"], "chaos.faults.when=", "when"),
    (["chaos.faults=[{at: noon}]"], "chaos.faults.at=", "noon"),
    (["tracking=mlflow"], "tracking=mlflow", "none, wandb"),
    (["tracking.mode=loud"], "tracking.mode=loud", "offline, online"),
    (["checkpoint.keep=0"], "checkpoint.keep=0", "at least 1"),
    (["supervisor.poll_s=0"], "supervisor.poll_s=0", "more than 0"),
    (["pools.local.batch_size=many"], "pools.local.batch_size=many", "whole number or null"),
    (["pools.local.min_lerners=2"], "pools.local.min_lerners=2", "pools.<name>.min_learners"),
    (["+pools.extra.min_lerners=2"], "pools.extra.min_lerners=2", "pools.<name>.min_learners"),
    (["pools.lcoal.batch_size=2"], "pools.lcoal.batch_size=2", "the pools are local;"),
    (["pools.lcoal.label_selector.zone=a"], "pools.lcoal.label_selector.zone=a", "the pools are local;"),
    (["+pools.extra.batch_size=2"], "pools.extra.min_learners=null", "pools.local takes the rest"),
    (["pools.local.workers_per_learner=0"], "pools.local.workers_per_learner=0", "at least 1"),
    (
        ["algo=data_parallel", "pools.local.workers_per_learner=2"],
        "pools.local.workers_per_learner=2",
        "1 is needed when algo=data_parallel",
    ),
    (
        ["pools.local.workers_per_learner=2", "pools.local.gpus_per_worker=0.5"],
        "pools.local.gpus_per_worker=0.5",
        "0 or whole GPUs are needed when workers_per_learner=2",
    ),
    (["pools=far"], "pools=far", "local, mixed"),
    (["pools=mixed", "train.batch_size=1"], "pools.slow.batch_size=0", "at least 1"),
    (["train.optimizer=adam"], "train.optimizer=adam", "muon, adamw"),
    (["diloco.outer=adam"], "diloco.outer=adam", "nesterov, sgd"),
    (["diloco.merge=median"], "diloco.merge=median", "rda, mean"),
    (["diloco.outer_gain_muon=0"], "diloco.outer_gain_muon=0", "more than 0"),
    (["diloco.outer_memory=-1"], "diloco.outer_memory=-1", "more than 0"),
    (["diloco.outer_memory_least=0.5"], "diloco.outer_memory_least=0.5", "at least 1"),
    (["diloco.outer_memory_most=1"], "diloco.outer_memory_most=1", "at least 2"),
    (["diloco.guard_z=-1"], "diloco.guard_z=-1", "at least 0"),
    (["diloco.guard_rounds=2"], "diloco.guard_rounds=2", "at least 3"),
    (["diloco.guard_after=2"], "diloco.guard_after=2", "3 to diloco.guard_rounds=16"),
    (["diloco.guard_after=17"], "diloco.guard_after=17", "3 to diloco.guard_rounds=16"),
    (["diloco.guard_spread=0"], "diloco.guard_spread=0", "more than 0"),
    (["supervisor.silent_s=0"], "supervisor.silent_s=0", "more than 0"),
    (["run.dir=memory://run"], "run.dir=memory://run", "a store that all processes see is needed"),
    (["run.dir=local:///tmp/run"], "run.dir=local:///tmp/run", "a store that all processes see is needed"),
    (["run.dir=s4://bucket/run"], "run.dir=s4://bucket/run", "the URL of a store that fsspec knows is needed"),
    (["run.dir=simplecache::s3://bucket/run"], "run.dir=simplecache::s3://bucket/run", "a store that all"),
    (["run.cache_dir=cache"], "run.cache_dir=cache", "an absolute path or null"),
    (["run.dir=s3://bucket/run", "chaos.rates.fill_disk=1"], "chaos.rates.fill_disk=1", "0 is needed when run.dir"),
    (
        ["run.dir=s3://bucket/run", "chaos.faults=[{kind: fill_disk, at: 0.5}]"],
        "chaos.faults[0].kind=fill_disk",
        "run.dir as a folder",
    ),
    (["run.dir=file://runs/x"], "run.dir=file://runs/x", "file:///absolute/path"),
]


@pytest.mark.parametrize(("overrides", "named", "allowed"), REFUSED, ids=[" ".join(r[0]) for r in REFUSED])
def test_a_wrong_setting_is_refused_in_one_line(overrides: list[str], named: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(overrides)
    line = str(refusal.value)
    assert "\n" not in line
    assert line.startswith(named)
    assert allowed in line.removeprefix(named)


def test_every_whole_number_and_every_time_has_an_end() -> None:
    for key in known_keys().values():
        if key.type in ("int", "int | None") or key.name.endswith("_s"):
            for number in (10**20, 1e20) if key.type == "float" else (10**20,):
                with pytest.raises(ConfigError, match=rf"^{key.name}=.* at most"):
                    check_limits([(key.name, number)])
    check_limits([("train.lr", 1e20), ("run.name", "x"), ("run.shared_dir", True), ("data.max_bytes", None)])


def test_defaults_are_the_schema() -> None:
    config = load([])
    schema = Config()
    assert config == dataclasses.replace(schema, run=dataclasses.replace(schema.run, dir="runs/main"))
    assert config.learner_ids == ("learner-0", "learner-1", "learner-2", "learner-3")


def test_overrides_reach_every_section(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x")
    config = load(
        [
            "learners=2",
            "run.name=trial",
            "model=micro",
            "data=files",
            f"data.path={text}",
            "train.lr=1e-2",
            "diloco.min_quorum=2",
            "pools.local.label_selector={ray.io/market-type: spot}",
            "chaos=freeze_one",
            "tracking=wandb",
            "tracking.tags=[a,b]",
        ]
    )
    assert config.run.path == "runs/trial"
    assert config.model.hidden == 32
    assert config.data.path == str(text)
    assert config.train.lr == 0.01
    assert config.pools["local"].label_selector == {"ray.io/market-type": "spot"}
    assert config.chaos.faults == [Fault(kind="freeze", target="learner-1", at=0.4, seconds=20.0)]
    assert config.tracking.tags == ["a", "b"]


def test_a_known_key_may_be_forced() -> None:
    assert load(["++learners=2", "+pools.local.label_selector.zone=a"]).learners == 2


def test_the_last_of_two_overrides_holds() -> None:
    assert load(["learners=3", "learners=2"]).learners == 2


def test_one_label_can_be_set_by_its_own_key() -> None:
    assert load(["pools.local.label_selector.zone=a"]).pools["local"].label_selector == {"zone": "a"}


def test_a_configuration_survives_yaml() -> None:
    config = load(["chaos=kill_one", "pools=mixed", "pools.slow.label_selector={a: b}", "data.max_bytes=5"])
    assert from_yaml(as_yaml(config)) == config
    with pytest.raises(ConfigError, match="lerners"):
        from_yaml("lerners: 3")


def test_learners_are_given_to_pools_in_the_order_of_the_pools() -> None:
    config = load(["learners=5", "pools=mixed", "pools.fast.accumulation=3", "train.precision=bf16"])
    assert config.pool_sizes == {"fast": 3, "slow": 2}
    assert [config.pool_of(learner).name for learner in config.learner_ids] == ["fast"] * 3 + ["slow"] * 2
    fast, slow = config.pool_of("learner-2"), config.pool_of("learner-3")
    assert (fast.train.batch_size, fast.train.accumulation, fast.train.precision) == (8, 3, "bf16")
    assert (slow.train.batch_size, slow.train.accumulation, slow.train.precision) == (4, 1, "bf16")
    assert (fast.settings.slowdown, slow.settings.slowdown) == (1.0, 3.0)
    with pytest.raises(ValueError):
        config.pool_of("learner-5")


def test_a_pool_can_be_added_and_comes_last() -> None:
    config = load(["+pools.extra.min_learners=1", "+pools.extra.batch_size=2", "+pools.far={min_learners: 2}"])
    assert config.pool_sizes == {"local": 1, "extra": 1, "far": 2}
    assert config.pools["extra"] == PoolConfig(min_learners=1, batch_size=2)
    assert list(config.pools) == ["local", "extra", "far"]


def test_an_empty_pool_gets_nobody() -> None:
    config = load(["learners=1", "pools=mixed"])
    assert config.pool_sizes == {"fast": 1, "slow": 0}
    assert config.pool_of("learner-0").name == "fast"


def test_the_ladder_of_algorithms() -> None:
    plain = load(["learners=3"])
    assert load(["learners=3", "algo=decoupled"]) == plain
    streaming = load(["learners=3", "algo=streaming", "diloco.mix_alpha=0.25"])
    expected = {"blocking": True, "min_quorum": 3, "adopt": "mix", "mix_alpha": 0.25, "merge": "mean"}
    assert streaming.diloco == dataclasses.replace(plain.diloco, **expected)
    diloco = load(["learners=3", "algo=diloco", "diloco.sync_interval=50"]).diloco
    assert (diloco.blocking, diloco.fragments, diloco.overlap_steps, diloco.min_quorum) == (True, 1, 0, 3)
    assert (diloco.adopt, diloco.merge, diloco.sync_interval) == ("overwrite", "mean", 50)
    for same in ("diloco.min_quorum=3", "diloco.blocking=true", "pools.local.max_learners=3"):
        assert load(["learners=3", "algo=diloco", same, "diloco.merge=rda"]).diloco.merge == "rda"
        assert load(["learners=3", "algo=streaming", same, "diloco.fragments=4"]).diloco.fragments == 4
    parallel = load(["algo=data_parallel", "train.elastic=true"])
    assert (parallel.algo, parallel.diloco.adopt, parallel.diloco.outer_lr) == ("data_parallel", "keep", 1.0)
    assert (parallel.diloco.last_round, parallel.diloco.average) == ("outer", 0.0)


@pytest.mark.parametrize("change", [{"blocking": True}, {"adopt": "rebase"}])
def test_data_parallel_only_works_with_weights_that_stay(change: dict[str, Any]) -> None:
    good = load(["algo=data_parallel"])
    check(good)
    with pytest.raises(ConfigError, match="when algo=data_parallel"):
        check(dataclasses.replace(good, diloco=dataclasses.replace(good.diloco, **change)))
    with pytest.raises(ConfigError, match=r"^pools\.a\.gpus_per_worker=0\.5"):
        check(dataclasses.replace(good, pools={"a": PoolConfig(gpus_per_worker=0.5)}))


REFUSED_POOLS = [
    ({}, "pools={}", "at least one"),
    ({"a": PoolConfig(min_learners=3)}, "pools.a.min_learners=3", "3 learners, and learners=4"),
    ({"a": PoolConfig(), "b": PoolConfig(min_learners=5)}, "pools.b.min_learners=5", "5 learners, and learners=4"),
    ({"a": PoolConfig(min_learners=-1), "b": PoolConfig()}, "pools.a.min_learners=-1", "at least 0"),
    ({"a": PoolConfig(), "b": PoolConfig()}, "pools.b.min_learners=null", "pools.a takes the rest"),
    ({"a/b": PoolConfig()}, "pools=a/b", "without slashes"),
    ({"a": PoolConfig(cpus_per_worker=0.0)}, "pools.a.cpus_per_worker=0.0", "more than 0"),
    ({"a": PoolConfig(cpus_per_worker=1.5)}, "pools.a.cpus_per_worker=1.5", "whole numbers above"),
    ({"a": PoolConfig(gpus_per_worker=-1.0)}, "pools.a.gpus_per_worker=-1.0", "at least 0"),
    ({"a": PoolConfig(gpus_per_worker=2.5)}, "pools.a.gpus_per_worker=2.5", "whole numbers above"),
    ({"a": PoolConfig(batch_size=0)}, "pools.a.batch_size=0", "at least 1"),
    ({"a": PoolConfig(accumulation=0)}, "pools.a.accumulation=0", "at least 1"),
    ({"a": PoolConfig(precision="fp16")}, "pools.a.precision=fp16", "auto, fp32, bf16"),
    ({"a": PoolConfig(slowdown=0.5)}, "pools.a.slowdown=0.5", "at least 1"),
    ({"a": PoolConfig(slowdown=math.inf)}, "pools.a.slowdown=inf", "finite"),
]


@pytest.mark.parametrize(("pools", "named", "allowed"), REFUSED_POOLS, ids=[r[1] for r in REFUSED_POOLS])
def test_a_wrong_pool_is_refused(pools: dict[str, PoolConfig], named: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(dataclasses.replace(Config(), pools=pools))
    assert str(refusal.value).startswith(f"{named} is refused")
    assert allowed in str(refusal.value)


@pytest.mark.parametrize("cpus", [-1.0, 1.5])
def test_a_wrong_share_of_the_syncer_is_refused(cpus: float) -> None:
    with pytest.raises(ConfigError, match=r"^syncer\.cpus"):
        check(dataclasses.replace(Config(), syncer=SyncerConfig(cpus)))


def test_nan_is_refused_wherever_it_comes_from() -> None:
    faults = [Fault(target="learner-1", at=math.nan)]
    config = dataclasses.replace(Config(), chaos=dataclasses.replace(Config().chaos, faults=faults))
    with pytest.raises(ConfigError, match=r"chaos\.faults\[0\]\.at=nan"):
        check(config)


def test_fragments_are_held_against_the_model() -> None:
    check_fragments(8, Config())
    with pytest.raises(ConfigError, match=r"^diloco\.fragments=8 is refused: allowed are 1 to 7"):
        check_fragments(7, Config())


def test_a_setting_can_be_replaced_nowhere_but_in_a_copy() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load([]).learners = 5  # type: ignore[misc]


def test_help_names_every_key_with_default_and_meaning() -> None:
    text = describe()
    for key in known_keys().values():
        assert f"\n  {key.name}: {key.type} = " in text
        assert len(key.doc) > 10, key.name
    assert "diloco.fragments: int = 8" in text
    assert "P: fragments the parameters are split into." in text
    assert "model=hf|micro|tiny" in text


def test_a_field_without_a_docstring_is_seen() -> None:
    docs = field_docs(DilocoSettings)
    assert set(docs) == {field.name for field in dataclasses.fields(DilocoSettings)}
    assert all(docs.values())


def test_actors_get_the_schema_without_hydra() -> None:
    code = "import sys, app.config; sys.exit('hydra' in sys.modules or 'omegaconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_with_chaos_or_another_algorithm_has_a_folder_of_its_own() -> None:
    assert load(["chaos=kill_one"]).run.dir == "runs/kill_one"
    assert load(["chaos=none"]).run.dir == load([]).run.dir == "runs/main"
    assert load(["algo=diloco", "chaos=kill_one"]).run.dir == "runs/diloco-kill_one"
    assert load(["chaos=kill_one", "run.name=mine"]).run.dir == "runs/mine"
    assert load(["chaos=kill_one", "run.dir=/x"]).run.dir == "/x"
