"""The image and the files that run it, each read by its own tool where that is installed, and by
what every machine has."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from errno import EPERM
from pathlib import Path

import pytest

from infinity import native
from infinity.tools import cli

yaml = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCKERFILE = (EXAMPLES / "Dockerfile").read_text()
IO_URING = {"io_uring_setup", "io_uring_enter", "io_uring_register"}


def read(name: str) -> dict:
    return yaml.safe_load((EXAMPLES / name).read_text())


def commands() -> dict[str, list[str]]:
    """The arguments that each file gives to `infinity`."""
    pod = read("kubernetes.yaml")["spec"]["template"]["spec"]
    run = read("sky.yaml")["run"].splitlines()[-1]
    return {
        "compose.yaml": read("compose.yaml")["services"]["train"]["command"],
        "kubernetes.yaml": pod["containers"][0]["args"],
        "sky.yaml": shlex.split(run)[1:],
    }


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml", "sky.yaml"])
def test_what_a_container_runs_is_a_command_of_infinity(name, capsys):
    """Parses the arguments with the command line's own parser. The twin has one option more."""
    args = cli.parse(commands()[name])
    assert args.subcommand == "train" and args.resume and args.checkpoint
    with pytest.raises(SystemExit):
        cli.parse([*commands()[name], "--no-such-option"])


def stages(text: str) -> list[list[str]]:
    """The instructions of each stage of a Dockerfile."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text)).splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("FROM ")]
    return [
        [line for line in lines[start:end] if line.strip()]
        for start, end in zip(starts, [*starts[1:], len(lines)])
    ]


def faults(text: str) -> list[str]:
    """What a Dockerfile gets wrong: a compiler in the image that runs, root as its user, a command
    that no shell reads, a copy of what is not there."""
    build, runtime = stages(text)
    found = []
    for line in (line for line in [*build, *runtime] if line.startswith("RUN ")):
        if subprocess.run(["sh", "-n", "-c", line[4:]], capture_output=True).returncode:
            found.append(f"shell: {line}")
    installed = " ".join(line for line in runtime if line.startswith("RUN ")).split()
    found += [f"compiler: {each}" for each in ("g++", "liburing-dev", "nvcc") if each in installed]
    users = [line.split()[1] for line in runtime if line.startswith("USER ")]
    if not users or users[-1] in ("root", "0"):
        found.append("user: root")
    for line in (line for line in build if line.startswith("COPY ")):
        if not (EXAMPLES.parent / line.split()[1]).exists():
            found.append(f"copy: {line}")
    return found


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("USER worker", "USER root"), "user"),
        (("liburing2 python3 ", "liburing2 g++ python3 "), "compiler"),
        (("COPY . /source", "COPY nowhere /source"), "copy"),
        (("RUN python3 -m venv /tools && ", "RUN python3 -m venv /tools && ("), "shell"),
    ],
)
def test_the_image_has_no_compiler_and_no_root(change, fault):
    """Reads the two stages of the Dockerfile; each twin has one fault."""
    assert faults(DOCKERFILE) == []
    twin = DOCKERFILE.replace(*change)
    assert twin != DOCKERFILE
    assert [each.partition(":")[0] for each in faults(twin)] == [fault]


def test_the_image_is_built_with_kernels_for_every_gpu_of_the_wheels():
    """Compares the Dockerfile's targets with those of tools/wheels.py."""
    named = re.search(
        r'^TARGETS = "(.*)"$', (EXAMPLES.parent / "tools/wheels.py").read_text(), re.M
    )
    assert f"ARG GPUS={named[1]}\n" in DOCKERFILE and "ARG CUDA=1\n" in DOCKERFILE


def test_a_dockerfile_parser_reads_the_image():
    """By the stages that dockerfile-parse finds."""
    parse = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is not installed")
    parser = parse.DockerfileParser(path=str(EXAMPLES / "Dockerfile"))
    kinds = [each["instruction"] for each in parser.structure]
    assert kinds.count("FROM") == 2 and kinds[-1] == "ENTRYPOINT"
    assert len(parser.parent_images) == 2


def test_compose_gives_the_container_its_disk_and_its_locked_memory(monkeypatch):
    """Reads the file as YAML, and has docker compose read it if it is installed."""
    read_file = read("compose.yaml")
    train = read_file["services"]["train"]
    assert train["ulimits"]["memlock"] == -1
    assert any(each.split(":")[-1] == "/scratch" for each in train["volumes"])
    [(kind, profile)] = [each.split("=") for each in train["security_opt"]]
    assert kind == "seccomp" and (EXAMPLES / profile).exists()
    assert (EXAMPLES / train["build"]["context"] / train["build"]["dockerfile"]).exists()
    for command in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"]).returncode:
            break
    else:
        pytest.skip("docker compose is not installed: the file was read as YAML only")
    command += ["-f", EXAMPLES / "compose.yaml", "config", "--format", "json"]
    monkeypatch.setenv("NVME", "/local/nvme")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    volume = json.loads(done.stdout)["volumes"]["scratch"]
    assert volume["driver_opts"]["device"] == "/local/nvme"
    monkeypatch.delenv("NVME")
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode and "NVME" in refused.stderr  # the twin: no disk was named


def test_the_job_runs_without_root_and_with_its_disk():
    """Reads the file as YAML."""
    pod = read("kubernetes.yaml")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    mounted = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounted.keys() == {each["name"] for each in pod["volumes"]}
    assert mounted["scratch"] == "/scratch" and "hostPath" in pod["volumes"][0]


def test_kubernetes_takes_the_job():
    """Against Kubernetes' own schema. The twin has a field that it does not know."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    job = read("kubernetes.yaml")
    validate.validate(job, validate.latest_version(), strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["ulimits"] = {"memlock": -1}
    with pytest.raises(validate.ValidationError):
        validate.validate(job, validate.latest_version(), strict=True)


def test_skypilot_takes_the_task(monkeypatch, tmp_path):
    """By SkyPilot's own parser. The twin has a field that it does not know."""
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    monkeypatch.chdir(EXAMPLES.parent)
    task = sky.Task.from_yaml(str(EXAMPLES / "sky.yaml"))
    assert task.name == "infinity" and "infinity train" in task.run
    (tmp_path / "twin.yaml").write_text((EXAMPLES / "sky.yaml").read_text() + "memlock: -1\n")
    with pytest.raises(Exception, match="memlock"):
        sky.Task.from_yaml(str(tmp_path / "twin.yaml"))


def test_the_seccomp_profile_allows_io_uring_and_no_way_out():
    """Reads the profile: what is not named is allowed, and what escapes a container is named."""
    profile = json.loads((EXAMPLES / "seccomp.json").read_text())
    refused = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW" and not refused & IO_URING
    assert {"mount", "bpf", "unshare", "setns", "kexec_load", "init_module"} <= refused
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}
    flags = {rule["args"][0]["value"] for rule in profile["syscalls"] if rule["names"] == ["clone"]}
    # of namespaces: mounts, control groups, names, IPC, users, processes, networks
    assert sum(flags) == 0x7E020000


IN_A_FILTER = """
import ctypes, json, os, sys
import pyseccomp
profile = json.load(open(sys.argv[1]))
filters = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
for rule in profile["syscalls"]:
    for name in rule["names"]:
        conditions = [
            pyseccomp.Arg(each["index"], pyseccomp.MASKED_EQ, each["value"], each["valueTwo"])
            for each in rule.get("args", [])
        ]
        try:
            filters.add_rule(pyseccomp.ERRNO(rule["errnoRet"]), name, *conditions)
        except Exception as error:
            print("unknown", name, type(error).__name__, file=sys.stderr)
filters.load()
libc = ctypes.CDLL(None, use_errno=True)
libc.unshare(0x10000000)
unshare = ctypes.get_errno()
libc.syscall(425, 0, 0)  # io_uring_setup, which then says what is wrong with its arguments
print(json.dumps({"unshare": unshare, "io_uring": ctypes.get_errno()}))
"""


@pytest.mark.parametrize("twin", [False, True])
def test_a_process_under_the_profile_may_ask_for_io_uring(twin, tmp_path):
    """Loads the profile in a child by libseccomp: a namespace of its own is refused (EPERM), a ring
    is not. The twin refuses rings, too."""
    pytest.importorskip("pyseccomp", reason="pyseccomp is not installed")
    if refusal := native.uring_refusal():
        pytest.skip(refusal)
    profile = json.loads((EXAMPLES / "seccomp.json").read_text())
    profile["syscalls"][0]["names"] += IO_URING if twin else ()
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FILTER, tmp_path / "profile.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert errors["unshare"] == EPERM and (errors["io_uring"] == EPERM) == twin
