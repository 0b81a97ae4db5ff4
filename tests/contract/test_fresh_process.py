"""Merged models saved and loaded in another process give the same outputs; one process for all families."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lsp_core
from lsp_core.merging import merge_model
from lsp_core.modeling import save_compressed
from tests.contract.cases import DTYPES, prepare

FRESH_PROCESS = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from lsp_core.modeling import load_compressed
torch.set_num_threads(1)
for folder in map(Path, sys.argv[1:]):
    model = load_compressed(folder)
    arguments = load_file(folder / "arguments.tensors") | json.loads((folder / "constants.json").read_text())
    with torch.no_grad():
        result = model(**arguments)
    output = result.last_hidden_state if getattr(result, "logits", None) is None else result.logits
    save_file({"output": output.contiguous()}, folder / "output.tensors")
"""


@pytest.fixture(scope="session")
def reloaded(request, tmp_path_factory):
    """Saves the merged model of every case that this session runs, loads them all in one new process.

    Returns for each case the output of the merged model here and there.
    """
    chosen = sorted(
        {
            item.callspec.params["case"]
            for item in request.session.items
            if item.originalname == test_a_fresh_process_gives_the_same_output.__name__
        }
    )
    expected, folders = {}, {}
    for key in chosen:
        case = prepare(key[0], DTYPES[key[1]])
        model = case.copy_model()
        merge_model(model, case.units, case.perturbed())
        folder = folders[key] = tmp_path_factory.mktemp(case.name)
        save_compressed(model, case.units, folder)
        arguments = case.inputs.arguments(case.examples, model)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "arguments.tensors")
        constants = {name: value for name, value in arguments.items() if name not in tensors}
        (folder / "constants.json").write_text(json.dumps(constants))
        expected[key] = case.outputs(model)
    environment = os.environ | {"PYTHONPATH": str(Path(lsp_core.__file__).parents[1])}
    command = [sys.executable, "-c", FRESH_PROCESS, *map(str, folders.values())]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path_factory.getbasetemp())
    return {key: (expected[key], load_file(folder / "output.tensors")["output"]) for key, folder in folders.items()}


def test_a_fresh_process_gives_the_same_output(case, reloaded, request):
    here, there = reloaded[request.node.callspec.params["case"]]
    assert there.dtype == case.dtype
    assert torch.equal(here, there)
    assert not torch.equal(here, case.outputs(case.model)), "the merged model must differ from the dense one"
