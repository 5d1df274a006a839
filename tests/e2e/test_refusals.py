"""A wrong configuration: one line that names key, value and what is allowed, exit 2, before Ray starts."""

import pytest
from ray.cluster_utils import Cluster

from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["diloco.min_quorum=3"], ["diloco.min_quorum", "3", "learners=2"]),
        (["diloco.fragments=40"], ["diloco.fragments", "40", "allowed are 1 to"]),
        (["train.tokens=-5"], ["train.tokens", "-5"]),
        (["model=gpt9"], ["model", "gpt9", "tiny"]),
        (["data=files", "data.path=/no/such/file"], ["data.path", "/no/such/file", "no such file"]),
        (["diloco.fragmens=4"], ["diloco.fragmens", "diloco.fragments"]),
    ],
)
def test_one_line_and_exit_2(command, overrides, parts):
    refused = command(*overrides)
    assert refused.wait() == 2
    errors = [line for line in refused.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert refused.output.splitlines()[-1] == errors[0]
    assert all(part in errors[0] for part in parts), errors[0]
    assert "Traceback" not in refused.output
    assert "starting Ray" not in refused.output


@pytest.mark.parametrize("override", ["pools.local.gpus_per_worker=64", "pools.local.label_selector={zone: nowhere}"])
def test_what_this_machine_can_never_place_is_refused(command, override):
    refused = command(override)
    assert refused.wait() == 2, refused.output
    last = refused.output.splitlines()[-1]
    assert last.startswith(f"error: {override.split('=')[0]}")
    assert "this machine has" in last
    assert not list(refused.folder.glob("checkpoints/*"))  # the same folder is free for the right command


def test_an_address_where_nobody_listens_is_refused(command):
    address = f"127.0.0.1:{free_port()}"
    refused = command(env={"RAY_ADDRESS": address})
    assert refused.wait() == 2, refused.output
    assert refused.output.splitlines()[-1].startswith(f"error: RAY_ADDRESS={address}")


def test_several_nodes_need_a_folder_that_all_of_them_see(command):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        refused = command(env={"RAY_ADDRESS": cluster.address})
        assert refused.wait() == 2, refused.output
    finally:
        cluster.shutdown()
    last = refused.output.splitlines()[-1]
    assert last.startswith(f"error: run.dir={refused.folder} is refused: the cluster has 2 nodes")
    assert "run.shared_dir=true" in last
    assert not list(refused.folder.glob("checkpoints/*"))


def test_a_cluster_with_another_token_is_refused(command, ray_head):
    refused = command(env={"RAY_ADDRESS": ray_head, "RAY_AUTH_TOKEN": "0" * 32})
    assert refused.wait() == 2, refused.output
    last = refused.output.splitlines()[-1]
    assert last.startswith(f"error: RAY_ADDRESS={ray_head}")
    assert "RAY_AUTH_TOKEN" in last
    assert not list(refused.folder.glob("checkpoints/*"))
