"""A wrong configuration: one line that names key, value and what is allowed, exit 2, before Ray starts."""

import socket

import pytest

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


@pytest.mark.parametrize("override", ["pools.local.gpus_per_learner=64", "pools.local.label_selector={zone: nowhere}"])
def test_what_this_machine_can_never_place_is_refused(command, override):
    refused = command(override)
    assert refused.wait() == 2, refused.output
    last = refused.output.splitlines()[-1]
    assert last.startswith(f"error: {override.split('=')[0]}")
    assert "this machine has" in last
    assert not list(refused.folder.glob("checkpoints/*"))  # the same folder is free for the right command


def test_an_address_where_nobody_listens_is_refused(command):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    refused = command(env={"RAY_ADDRESS": address})
    assert refused.wait() == 2, refused.output
    assert refused.output.splitlines()[-1].startswith(f"error: RAY_ADDRESS={address}")
