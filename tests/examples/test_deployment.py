"""The files for clusters: the Kubernetes manifest is what KubeRay takes, the image's steps run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "penstock.yaml"
DOCKERFILE = ROOT / "examples" / "docker" / "Dockerfile"

KUBERAY_CRD = os.environ.get("KUBERAY_CRD", "")
"""KubeRay's own `ray.io_rayjobs.yaml`, for whoever has it."""


def documents() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


def strict(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
NAMED = {"type": "array", "items": {"type": "object", "required": ["name"]}, "minItems": 1}
CONTAINER = strict(
    {
        "name": {"type": "string"},
        "image": {"type": "string"},
        "resources": strict({"requests": STRINGS, "limits": STRINGS}),
        "env": {"type": "array", "items": strict({"name": {}, "value": {"type": "string"}})},
        "volumeMounts": {"type": "array", "items": strict({"name": {}, "mountPath": {}})},
    },
    "name",
    "image",
)
POD = strict(
    {
        "metadata": strict({"labels": STRINGS}),
        "spec": strict(
            {
                "affinity": {"type": "object"},
                "containers": {"type": "array", "items": CONTAINER, "minItems": 1},
                "volumes": NAMED,
            },
            "containers",
        ),
    },
    "spec",
)
COUNT = {"type": "integer", "minimum": 0}
RAY_JOB = strict(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": strict({"name": {"type": "string"}}),
        "spec": strict(
            {
                "entrypoint": {"type": "string"},
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "SidecarMode"]},
                "backoffLimit": COUNT,
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": COUNT,
                "rayClusterSpec": strict(
                    {
                        "rayVersion": {"type": "string"},
                        "authOptions": strict({"mode": {"enum": ["disabled", "token"]}}),
                        "headGroupSpec": strict(
                            {"rayStartParams": STRINGS, "template": POD}, "template"
                        ),
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": strict(
                                {
                                    "groupName": {"type": "string"},
                                    "replicas": COUNT,
                                    "minReplicas": COUNT,
                                    "maxReplicas": COUNT,
                                    "rayStartParams": STRINGS,
                                    "template": POD,
                                },
                                "groupName",
                                "maxReplicas",
                                "minReplicas",
                                "template",
                            ),
                        },
                    },
                    "headGroupSpec",
                ),
            }
        ),
    },
    "apiVersion",
    "kind",
)
"""What KubeRay 1.7 takes, of the keys that the manifest has: written from its reference."""


def faults(document: Any, schema: Mapping[str, Any]) -> list[str]:
    found = Draft202012Validator(schema).iter_errors(document)
    return [f"{one.json_path}: {one.message}" for one in found]


def test_the_ray_job_is_one_that_kuberay_takes() -> None:
    job = documents()["RayJob"]
    assert faults(job, RAY_JOB) == []
    job["spec"]["rayClusterSpec"]["workerGroupSpec"] = []
    assert len(faults(job, RAY_JOB)) == 1


@pytest.mark.skipif(not KUBERAY_CRD, reason="KUBERAY_CRD does not name KubeRay's schema of RayJobs")
def test_the_ray_job_is_one_that_kuberays_own_schema_takes() -> None:
    crd = yaml.safe_load(Path(KUBERAY_CRD).read_text())
    (version,) = (one for one in crd["spec"]["versions"] if one["name"] == "v1")
    schema = closed(version["schema"]["openAPIV3Schema"])
    job = documents()["RayJob"]
    assert faults(job, schema) == []
    job["spec"]["rayClusterSpec"]["workerGroupSpec"] = []
    assert len(faults(job, schema)) == 1


def closed(schema: Any) -> Any:
    """Without keys that are not listed, which the API server would leave out silently."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        free = "additionalProperties" in schema or not schema["properties"]
        made |= {} if free else {"additionalProperties": False}
        if schema["properties"].keys() >= {"apiVersion", "kind", "metadata", "spec"}:
            made["properties"]["metadata"] = {"type": "object"}
    if schema.get("x-kubernetes-int-or-string"):
        made = {"type": ["integer", "string"]}
    return made


def pods() -> Iterator[Any]:
    cluster = documents()["RayJob"]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]


def test_what_the_manifest_names_is_there() -> None:
    made = documents()
    kinds = {"persistentVolumeClaim": "PersistentVolumeClaim", "configMap": "ConfigMap"}
    policy = made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    for pod in pods():
        assert policy.items() <= pod["metadata"]["labels"].items()
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            for source, kind in kinds.items():
                named = volume.get(source, {})
                name = named.get("claimName") or named.get("name")
                assert name in (None, made[kind]["metadata"]["name"])
    words = shlex.split(made["RayJob"]["spec"]["entrypoint"])
    assert words == ["bash", f"/opt/penstock-run/{next(iter(made['ConfigMap']['data']))}"]


def test_a_run_is_begun_once_and_then_gone_on_with(tmp_path: Path) -> None:
    """The script of the ConfigMap, with a folder of this machine and a command that only speaks."""
    script = documents()["ConfigMap"]["data"]["run.sh"].replace("/shared", str(tmp_path))
    penstock = tmp_path / "bin" / "penstock"
    penstock.parent.mkdir()
    penstock.write_text('#!/bin/bash\necho "$@"\n')
    penstock.chmod(0o755)
    path = f"{penstock.parent}:{os.environ['PATH']}"

    def said() -> str:
        return subprocess.run(
            ["bash", "-c", script],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    assert said().startswith(f"run executor=ray runs={tmp_path}/runs/penstock ")
    for name, age_s in (("old", 100), ("new", 0)):
        file = tmp_path / "runs" / "penstock" / name / "config.yaml"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (1e9 - age_s, 1e9 - age_s))
    assert said() == f"run resume={tmp_path}/runs/penstock/new\n"


def steps() -> list[str]:
    return [
        line.removeprefix("RUN ")
        for line in DOCKERFILE.read_text().splitlines()
        if line.startswith("RUN ")
    ]


def left_out(folder: str, names: list[str]) -> set[str]:
    """What is no part of the image: at the top alone, as there are packages called like outputs."""
    tops = (".venv", ".git", "runs", "build", "site", "*.egg-info")
    ignored = ("__pycache__", *(tops if Path(folder) == ROOT else ()))
    return shutil.ignore_patterns(*ignored)(folder, names)


@pytest.mark.timeout(1200)  # an installation; a busy machine takes its time
@pytest.mark.nightly
def test_the_steps_of_the_image_run(tmp_path: Path) -> None:
    """In an environment of its own; without those that change the system: packages and a user."""
    ours = [step for step in steps() if not step.startswith(("apt-get", "useradd"))]
    assert len(ours) == len(steps()) - 2
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "python"], check=True, timeout=120)
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=left_out)
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    path = f"{tmp_path / 'python' / 'bin'}:{os.environ['PATH']}"
    for step in ours:
        done = subprocess.run(
            ["sh", "-ec", step],
            cwd=source,
            env={**own, "PATH": path, "ENGINES": ""},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
