"""`model/` in another virtual environment, where only transformers, torch and what these two ask for are installed."""

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.timeout(400)

LOAD = """
import importlib.util, json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer(sys.argv[2], return_tensors="pt").input_ids
with torch.no_grad():
    logits = model(ids).logits[0]
names = ("app", "actors", "conf", "ray", "datasets", "accelerate", "hydra", "omegaconf", "wandb")
found = [name for name in names if importlib.util.find_spec(name)]
text = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])
values = {"ids": ids[0].tolist(), "logits": logits.tolist(), "text": text}
print(json.dumps({"found": found, "prefix": sys.prefix, **values}))
"""
PROMPT = "def load(self, path):"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A virtual environment with links to the packages of this one."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    into = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for distribution in needed("torch", "transformers"):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = into / name
            if not link.exists():
                link.symlink_to(distribution.locate_file(name))
    return folder


def needed(*names):
    """These distributions and all that they require here, directly or not."""
    found, waiting = {}, list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            required = (Requirement(text) for text in found[name].requires or ())
            waiting += [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found.values()


@pytest.mark.slow
def test_the_model_is_the_same_in_an_environment_with_only_transformers(elsewhere, completed, tmp_path):
    folder = completed.folder / "model"
    # -I: neither PYTHONPATH nor the working folder adds anything
    command = [elsewhere / "bin" / "python", "-I", "-c", LOAD, folder, PROMPT]
    loaded = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    there = json.loads(loaded.stdout.splitlines()[-1])
    assert there["prefix"] == str(elsewhere) != sys.prefix
    assert there["found"] == []
    assert there["text"].startswith(PROMPT)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert there["ids"] == ids[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(there["logits"]), model(ids).logits[0])
