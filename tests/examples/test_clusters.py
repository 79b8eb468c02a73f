"""The Kubernetes manifest and the SkyPilot task train on all their nodes, in the image as well."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

import pretrain_gpt
from megatron_ext.train.exit_codes import FINAL, TRANSIENT
from tests.examples.scripts import EXAMPLES, LAUNCHED, ROOT, SECONDS, calls, rows, start, stub
from tests.training_runs import config_of, documents

RUNTIME, JOB = yaml.safe_load_all((EXAMPLES / "kubernetes/pretrain_gpt.yaml").read_text("utf-8"))
TASK = yaml.safe_load((EXAMPLES / "skypilot/pretrain_gpt.yaml").read_text("utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
TRAINER = JOB["spec"]["trainer"]
(NODE,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
POD = NODE["template"]["spec"]["template"]["spec"]
PET = {
    "PET_NNODES": str(TRAINER["numNodes"]),
    "PET_NPROC_PER_NODE": str(TRAINER["numProcPerNode"]),
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "pretrain-gpt-node-0-0.pretrain-gpt",
    "PET_MASTER_PORT": "29500",
}
"""The variables that Kubeflow Trainer gives to the second node."""
SKY = {
    "SKYPILOT_NUM_NODES": str(TASK["num_nodes"]),
    "SKYPILOT_NUM_GPUS_PER_NODE": TASK["resources"]["accelerators"].partition(":")[2],
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_TASK_ID": "sky-managed-1",
    "BUCKET": "s3://bucket",
}
"""The variables that SkyPilot gives to the second node, and the task's own."""
TINY = shlex.split(
    "--config recipes/tiny_gpt.yaml --layout 2xCPU --tokenizer-type NullTokenizer --vocab-size 90 "
    "--padded-vocab-size 256 --num-layers 2 --kv-channels 16 --train-iters 2 --lr-warmup-iters 0 "
    "--nproc-per-node 1 --eval-iters 0 --log-interval 1 --no-log-throughput"
)


def sky_words(folder: Path, **environment: str) -> list[str]:
    """Return the words of the command that the SkyPilot task ends with on a node."""
    stub(folder, "python")
    script = folder / "run.sh"
    script.write_text(TASK["run"])
    home = folder / "home/megatron_ext"
    home.mkdir(parents=True)
    (home / "bin").symlink_to(folder / "bin")
    code, shown = start(script, cwd=ROOT, HOME=str(folder / "home"), **SKY | environment)
    assert code == 0, shown
    (words,) = calls(folder, "python")
    return words


def kubernetes_words() -> list[str]:
    words: list[str] = [*TRAINER["command"], *TRAINER["args"]]
    assert words.pop(0) == "python"
    return words


def divided(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the options of torchrun, and the flags of the run."""
    assert words[:2] == ["-m", "megatron_ext.train.torchrun"]
    options = get_args_parser().parse_args(words[2:])
    return options, options.training_script_args


@pytest.mark.parametrize("name", ["kubernetes", "skypilot"])
def test_the_command_trains_on_all_nodes_and_fits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "kubernetes":
        for variable, value in PET.items():
            monkeypatch.setenv(variable, value)
        options, flags = divided(kubernetes_words())
        assert (options.training_script, options.no_python) == ("megatron-ext-pretrain-gpt", True)
        assert (options.node_rank, options.master_addr) == (1, PET["PET_MASTER_ADDR"])
        # There are no recipes in the image but those of the package.
        monkeypatch.chdir(tmp_path)
        save = "/training/run"
    else:
        options, flags = divided(sky_words(tmp_path))
        assert (options.training_script, options.no_python) == ("pretrain_gpt.py", False)
        assert (options.rdzv_endpoint, options.rdzv_backend) == ("10.0.0.1:29500", "c10d")
        save = "s3://bucket/run"
    ranks = int(options.nnodes) * int(options.nproc_per_node)
    assert ranks == 64
    config = config_of(flags, ranks=ranks, device="cuda")
    assert [flags[flags.index(name) + 1] for name in ("--save", "--load")] == [save, save]
    assert config.parallel.nproc_per_node == int(options.nproc_per_node)
    run = str(tmp_path / "run")
    here = ["--data-path", documents(tmp_path / "data", 40), "--save", run, "--load", run]
    here += shlex.split("--tokenizer-type NullTokenizer --vocab-size 128255 --eval-iters 0")
    here += shlex.split("--train-iters 10 --lr-warmup-iters 1 --dry-run")
    assert pretrain_gpt.main([*flags, *here]) == 0
    assert "\nfits: " in capsys.readouterr().out


def test_pods_that_need_no_other_start_end_the_job() -> None:
    (rule,) = NODE["template"]["spec"]["podFailurePolicy"]["rules"]
    assert sorted(rule["onExitCodes"]["values"]) == sorted(FINAL.keys() - {0})
    recovered = TASK["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert not set(recovered) & FINAL.keys()
    assert {code for code in recovered if code < 128} <= TRANSIENT.keys()


def test_a_pod_is_given_what_its_ranks_need() -> None:
    assert TRAINER["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == PET["PET_NPROC_PER_NODE"]
    options, _ = divided(kubernetes_words())
    assert POD["terminationGracePeriodSeconds"] > options.shutdown_timeout
    (container,) = POD["containers"]
    claimed = {volume["name"] for volume in POD["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == claimed
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert f"--uid {user} " in DOCKERFILE
    assert int(user) == POD["securityContext"]["runAsUser"]


def test_the_image_installs_extras_and_commands_that_exist() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    for extra in extras.split(","):
        assert f"\n{extra} = [" in pyproject
    for command in re.findall(r"megatron-ext-[\w-]+", DOCKERFILE):
        assert f"\n{command} = " in pyproject


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kubernetes", "skypilot"])
def test_two_nodes_train_by_the_command(name: str, tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    if name == "kubernetes":
        words = kubernetes_words()
        command = tmp_path / "bin/megatron-ext-pretrain-gpt"
        command.parent.mkdir()
        command.write_text(
            f"#!{sys.executable}\nfrom megatron_ext.programs import run_command\nrun_command()\n"
        )
        command.chmod(0o755)
    else:
        one = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
        words = sky_words(tmp_path, SKYPILOT_NODE_IPS="127.0.0.1", **one)
        words = [word.replace(":29500", f":{port}") for word in words]
    run = str(tmp_path / "run")
    words += [*TINY, "--data-path", documents(tmp_path / "data", 400), "--save", run, "--load", run]
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    nodes = []
    for rank in range(2):
        mine = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
        mine |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        environment = inherited | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **(mine if name == "kubernetes" else {}),
        }
        nodes.append(
            subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    said = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    assert [row["iteration"] for row in rows(Path(run), "train")] == [1, 2]
