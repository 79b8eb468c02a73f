"""Training runs on the other megatron-core than this process has, in a process of their own."""

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer import enums

from megatron_ext.checkpoint.files import TRACKER
from megatron_ext.checkpoint.optimizer_state import load_optimizer
from megatron_ext.checkpoint.state import common_state, sharded_state
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from tests.checkpoint.tiny import RUN_CONFIG, Tiny, build, manager, save
from tests.ranks import run_on_ranks
from tests.training_runs import ROOT, Rows, train_steps
from tests.video import clips

Job = dict[str, Any]
"""A run's ``words``, number of ``ranks`` and folder ``save``, and ``clips`` of video runs.

Or a key of `STOCK`, and the folder.
"""
TP2 = Layout(2, tensor_model_parallel_size=2)
VERSION = "import importlib.metadata as m; print(m.version('megatron-core'))"


@functools.cache
def other_python() -> str:
    """Return a Python with another megatron-core, or skip the test.

    It is ``OTHER_CORE_PYTHON``, or one of the environments that `tests/run.sh` makes.
    """
    own = importlib.metadata.version("megatron-core")
    given = os.environ.get("OTHER_CORE_PYTHON")
    found = [Path(given)] if given else sorted(ROOT.glob(".venv*/bin/python"))
    for python in found:
        done = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() != own:
            return str(python)
    pytest.skip(f"needs an environment beside this one of {own}: CORE=other bash tests/run.sh")


def there(jobs: list[Job]) -> list[Rows]:
    """Do jobs one after the other on the other core; return the rows of each."""
    words = [other_python(), "-W", "ignore", "-m", "tests.checkpoint.cores", json.dumps(jobs)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: list[Rows] = json.loads(done.stdout.splitlines()[-1])
    return found


def do(job: Job) -> Rows:
    """Do a job on the core of this process; return the rows of its training steps."""
    folder = Path(job["save"])
    if "stock" in job:
        run_on_ranks(STOCK[job["stock"]], TP2, {"root": folder})
        return []
    if "clips" in job:
        return clips.steps(Path(job["clips"]), folder, job["words"], ranks=job["ranks"])
    return train_steps(job["words"], folder, job["ranks"])


def _folder(root: Path) -> Path:
    return root / "iter_0000001"


def save_as_stock(context: ParallelContext, root: Path) -> None:
    """Save a tiny model after a step as Megatron-LM does on the core of this process."""
    tiny = build(context)
    tiny.step()
    checkpoints = manager(context, root)
    state = checkpoints._state(tiny.model, tiny.optimizer, tiny.scheduler, RUN_CONFIG, None, None)
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    parallel = {name: getattr(context.layout, name) for name in names}
    progress = {"iteration": 1, "consumed_train_samples": 8}
    state |= common_state(1, progress, {**RUN_CONFIG, "parallel": parallel})
    # Values of Megatron-LM's flags, the second of a class that older cores do not have.
    state["args"].attention_backend = enums.AttnBackend.auto
    if hasattr(enums, "CudaGraphModule"):
        state["args"].cuda_graph_modules = [enums.CudaGraphModule.attn]
    if context.rank == 0:
        _folder(root).mkdir(parents=True)
        (root / TRACKER).write_text("1")
    torch.distributed.barrier()
    content = state.pop("content_metadata")
    dist_checkpointing.save(state, str(_folder(root)), content_metadata=content)


def save_as_we(context: ParallelContext, root: Path) -> None:
    """Save a tiny model after a step with the package."""
    tiny = build(context)
    tiny.step()
    save(manager(context, root), tiny, 1, context)


def load_as_stock(context: ParallelContext, root: Path) -> None:
    """Check that stock megatron-core loads weights and optimizer state of `save_as_we`."""
    wanted, found = build(context), build(context)
    wanted.step()
    found.spoil()
    folder = str(_folder(root))
    common = dist_checkpointing.load_common_state_dict(folder)
    assert common["iteration"] == 1 and common["args"].consumed_train_samples == 8
    metadata = {**common["content_metadata"], "dp_cp_group": context.pgs.dp_cp}
    state = sharded_state(found.model, found.optimizer, metadata=metadata, is_loading=True)
    loaded, missing, unexpected = dist_checkpointing.load(state, folder, strict="return_all")
    assert unexpected == set() and all(name.startswith("rng_state") for name in missing)
    assert loaded["opt_param_scheduler"]["num_steps"] == 1
    found.model[0].load_state_dict(loaded["model"])
    # Read by stock, but put into place by the package: stock fails on the steps of torch's Adam.
    load_optimizer(found.optimizer, loaded["optimizer"])
    for each in (found, wanted):
        each.step()
    check_same_weights(found, wanted)


def check_same_weights(found: Tiny, wanted: Tiny) -> None:
    for mine, theirs in zip(found.model, wanted.model, strict=True):
        for (name, value), want in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(value, want), name


STOCK = {"save": save_as_stock, "load": load_as_stock}


if __name__ == "__main__":
    rows = [do(job) for job in json.loads(sys.argv[1])]
    print(json.dumps(rows))
