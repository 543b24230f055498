"""The image, the compose file, the chart and the examples: by linters, by Helm, and by the schemas of Kubernetes."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helpers.routers import tool

from fleetfoot._version import __version__

pytestmark = pytest.mark.contracts

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "fleetfoot"
REQUIRED, PREFERRED = (f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred"))
ODD: dict[str, dict[str, Any]] = {
    "defaults": {},
    "a CPU": {"gpus": 0, "resources": {"requests": {"cpu": 2}, "limits": {"memory": "4Gi"}}},
    "everything": {
        "model": "owner/a model: with \"quotes\" and #", "servedModelNames": ["small", "a: b"],
        "args": ["--max-model-len=8192", "-tp", 4, "--data_parallel_size=2",
                 "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}', 7],
        "env": [{"name": "UCX_TLS", "value": "tcp"}], "image": {"repository": "host:5000/fleetfoot", "tag": "1"},
        "imagePullSecrets": [{"name": "pull"}], "replicas": 0, "gpus": 8, "resources": {"limits": {"memory": "64Gi"}},
        "apiKeySecret": "api", "adminKeySecret": "admin", "clusterKeySecret": "cluster", "hfTokenSecret": "hub",
        "cache": {"size": "100Gi", "storageClass": "fast", "accessModes": ["ReadWriteMany"]},
        "port": 8200, "service": {"type": "NodePort", "port": 443},
        "kvEvents": {"enabled": True}, "podMonitor": {"enabled": True, "labels": {"team": "a"}},
        "inferencePool": {"enabled": True, "endpointPicker": "picker", "failureMode": "FailClose"},
        "autoscaling": {"enabled": True, "maxReplicas": 9}, "podLabels": {"a/b": "c"}, "podAnnotations": {"a": "1"},
        "nodeSelector": {"zone": "a"}, "serviceAccountName": "server",
        "tolerations": [
            {"operator": "Exists"}, {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "a", "value": "b"},
            {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 9},
        ],
        "affinity": {
            "nodeAffinity": {
                REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [
                    {"key": "zone", "operator": "In", "values": ["a"]}, {"key": "gpu", "operator": "Exists"},
                    {"key": "gpus", "operator": "Gt", "values": ["3"]},
                ]}]},
                PREFERRED: [{"weight": 1, "preference": {"matchFields": []}}],
            },
            "podAffinity": {REQUIRED: [{"topologyKey": "kubernetes.io/hostname", "namespaces": ["a"]}]},
            "podAntiAffinity": {PREFERRED: [{"weight": 100, "podAffinityTerm": {
                "topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}},
            }}]},
        },
        "extraVolumes": [{"name": "models", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
    },
    "what YAML and numbers bend": {
        "model": "C:\\x: \"y\" 'z' # {{ .Values }}\n\t é", "servedModelNames": ["null", "0x1F", "yes", ": ", "- a"],
        "args": ["--max-num-batched-tokens", 1048576, "--seed", 2**53 - 1, "--gpu-memory-utilization", 0.95, "", "on"],
        "replicas": 2_000_000, "shutdownSeconds": 10_000_000, "startupSeconds": 20_000_000, "sharedMemory": "1",
        "apiKeySecret": "1234", "adminKeySecret": "true", "serviceAccountName": "0123", "nodeSelector": {"n": "12"},
        "podLabels": {"app.kubernetes.io/name": "other", "b": "true"}, "podAnnotations": {"x": "1: 2\n#"},
        "cache": {"size": "100", "storageClass": "-", "accessModes": ["ReadWriteMany"]},
        "podMonitor": {"enabled": True, "labels": {"release": "1"}},
        "inferencePool": {"enabled": True, "endpointPicker": "123"}, "env": [{"name": "A", "value": "1"}],
        "autoscaling": {"enabled": True, "maxReplicas": 1_000_000, "waitingRequests": 1_500_000},
        "resources": {"limits": None}, "tolerations": [], "affinity": {},
    },
    "amounts": {
        "resources": {
            "requests": {"cpu": "1500m", "memory": "16G", "ephemeral-storage": "1e9", "example.com/nic": 1},
            "limits": {"cpu": 1.5, "memory": "16Gi", "ephemeral-storage": "1G", "example.com/nic": 1},
        },
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "k", "optional": True}}},
            {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "extraVolumes": [
            {"name": "a", "emptyDir": {"sizeLimit": "5Gi"}}, {"name": "b", "persistentVolumeClaim": {"claimName": "b"}},
            {"name": "c", "hostPath": {"path": "/c"}}, {"name": "d", "secret": {"secretName": "d"}},
        ],
        "extraVolumeMounts": [{"name": "b", "mountPath": "/b", "subPath": "x", "readOnly": True}],
        "cache": {"size": "5Gi"},
    },
    "several nodes": {
        "nodes": 2, "args": ["--tensor-parallel-size=2"], "clusterKeySecret": "cluster",
        "cache": {"existingClaim": "own"},
    },
    "an example": yaml.safe_load((DEPLOY / "examples" / "llm-d.yaml").read_text()),
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "LeaderWorkerSet": {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "spec": {"replicas", "leaderWorkerTemplate"},
        "spec.leaderWorkerTemplate": {"size", "restartPolicy", "leaderTemplate", "workerTemplate"},
    },
    "PodMonitor": {"apiVersion": "monitoring.coreos.com/v1", "spec": {"selector", "podMetricsEndpoints"}},
    "InferencePool": {
        "apiVersion": "inference.networking.k8s.io/v1",
        "spec": {"selector", "targetPorts", "endpointPickerRef"},
        "spec.endpointPickerRef": {"name", "port", "failureMode"},
    },
    "LLMInferenceService": {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "spec": {"model", "replicas", "router", "template"},
        "spec.model": {"uri", "name"},
    },
    "RayService": {
        "apiVersion": "ray.io/v1",
        "spec": {"serveConfigV2", "rayClusterConfig"},
        "spec.rayClusterConfig": {"headGroupSpec", "workerGroupSpecs"},
    },
}
"""Custom resources, which the validator has no schemas of: the fields that their projects document, of those used."""


def rendered(release: str = "story", **values: Any) -> list[dict[str, Any]]:
    """The manifests that Helm makes."""
    from helm_python import Chart

    with Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name=release, namespace="test")
    return [one for text in texts.values() for one in yaml.safe_load_all(text) if one]


def at(content: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        content = content[name]
    return content


def check(manifests: list[dict[str, Any]], folder: Path) -> set[str]:
    """Validate manifests; the pods of custom resources as Deployments. Returns the kinds."""
    standard = [one for one in manifests if one["kind"] not in FIELDS]
    for one in manifests:
        if (fields := FIELDS.get(one["kind"])) is not None:
            assert one["apiVersion"] == fields["apiVersion"]
            for path, names in fields.items():
                assert path == "apiVersion" or at(one, path).keys() <= names, (one["kind"], path)
        if one["kind"] == "LeaderWorkerSet":
            templates = one["spec"]["leaderWorkerTemplate"]
            for name in ("leaderTemplate", "workerTemplate"):
                labels = templates[name]["metadata"]["labels"]
                spec = {"selector": {"matchLabels": labels}, "template": templates[name]}
                standard.append(
                    {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}
                )
    path = folder / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(standard))
    result = subprocess.run([tool("kubernetes-validate"), "--strict", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return {one["kind"] for one in manifests}


@pytest.mark.parametrize("name", ODD)
def test_the_chart_makes_valid_manifests(name: str, tmp_path: Path) -> None:
    manifests = rendered(**ODD[name])
    kinds = check(manifests, tmp_path)
    assert {"Service", "LeaderWorkerSet" if name == "several nodes" else "Deployment"} <= kinds
    if name == "everything":
        assert kinds >= {"PersistentVolumeClaim", "PodMonitor", "InferencePool", "HorizontalPodAutoscaler"}
        container = next(one for one in manifests if one["kind"] == "Deployment")["spec"]["template"]["spec"][
            "containers"
        ][0]
        assert container["args"][0] == ODD[name]["model"] and container["args"][-1] == "7"
        assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 8}
        events = next(one for one in container["args"] if one.startswith("--kv-events-config="))
        assert json.loads(events.partition("=")[2])["topic"] == "kv@$(POD_IP)@small"


@pytest.mark.parametrize("release", ["null", "true", "f", "a" * 53, "fleetfoot" + "-x" * 22])
def test_odd_values_and_names_stay_what_they_are(release: str, tmp_path: Path) -> None:
    values = ODD["what YAML and numbers bend"]
    manifests = rendered(release, **values)
    check(manifests, tmp_path)
    found = {one["kind"]: one for one in manifests}
    assert all(len(one["metadata"]["name"]) <= 56 for one in manifests)
    pod, claim = found["Deployment"]["spec"]["template"], found["PersistentVolumeClaim"]["spec"]
    args = pod["spec"]["containers"][0]["args"]
    assert args[0] == values["model"] and args[3:9] == ["--served-model-name", *values["servedModelNames"]]
    assert args[-8:] == [str(one) for one in values["args"]] and "--shutdown-timeout=10000000" in args
    own = {"app.kubernetes.io/name": "fleetfoot", "app.kubernetes.io/instance": release}
    assert pod["metadata"]["labels"] == {**values["podLabels"], **own, "llm-d.ai/engine-type": "vllm"}
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("", "100")
    assert found["HorizontalPodAutoscaler"]["spec"]["maxReplicas"] == 1_000_000


@pytest.mark.parametrize("name", ["everything", "several nodes"])
def test_the_arguments_of_the_chart_are_flags_of_the_server(name: str) -> None:
    from fleetfoot.cli.main import make_parser

    values = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "10.0.0.1"}
    specs = [one["spec"] for one in rendered(**ODD[name]) if one["kind"] in ("Deployment", "LeaderWorkerSet")]
    pods = [spec["template"] for spec in specs if "template" in spec]
    for spec in specs:
        pods += [pod for key, pod in spec.get("leaderWorkerTemplate", {}).items() if key.endswith("Template")]
    assert len(pods) == (2 if name == "several nodes" else 1)
    for pod in pods:
        words = [word for word in pod["spec"]["containers"][0]["args"] if word != "7"]
        words = [re.sub(r"\$\(LWS_\w+\)", lambda found: values[found[0]], word) for word in words]
        arguments = make_parser().parse_args(["serve", *words])
        assert (arguments.port, arguments.headless) == (ODD[name].get("port", 8000), "--headless" in words)
        assert arguments.served_model_name == ODD[name].get("servedModelNames")


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("clusterKeySecret", {"nodes": 2}),
    ("gpus", {"gpus": -1}),
    ("port", {"port": 70000}),
    ("replica", {"replica": 3}),
    ("endpointPicker", {"inferencePool": {"enabled": True}}),
    ("endpointPicker", {"inferencePool": {"enabled": True, "endpointPicker": "http://picker"}}),
    ("nodes", {"nodes": "two"}),
    ("port", {"port": 5558, "kvEvents": {"enabled": True}}),
    ("replayPort", {"kvEvents": {"enabled": True, "replayPort": 5557}}),
    ("minReplicas", {"autoscaling": {"enabled": True, "minReplicas": 5}}),
    ("maxReplicas", {"autoscaling": {"enabled": True, "maxReplicas": 3e9}}),
    ("image", {"image": None}),
    ("repository", {"image": {"repository": "Fleet foot"}}),
    ("tag", {"image": {"tag": "a:b"}}),
    ("size", {"cache": {"size": None}}),
    *(("size", {"cache": {"size": size}}) for size in ("5 GB", "5GB", "5Gib", "-5Gi", "0", "0.0Gi", "many")),
    ("existingClaim", {"cache": {"existingClaim": "own", "size": "5Gi"}}),
    ("existingClaim", {"cache": {"existingClaim": "Own_claim"}}),
    ("storageClass", {"cache": {"storageClass": "fast"}}),
    ("accessModes", {"cache": {"size": "5Gi", "accessModes": ["ReadOnce"]}}),
    ("sharedMemory", {"sharedMemory": "1 Gi"}),
    ("sharedMemory", {"sharedMemory": ""}),
    ("memory", {"resources": {"limits": {"memory": "4 GB"}}}),
    ("cpu", {"resources": {"requests": {"cpu": -1}}}),
    ("requests.cpu is 2", {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1900m"}}}),
    ("requests.memory is 16Gi", {"resources": {"requests": {"memory": "16Gi"}, "limits": {"memory": "16G"}}}),
    ("requests.memory is 1e+10", {"resources": {"requests": {"memory": 1e10}, "limits": {"memory": "1e9"}}}),
    ("example.com/nic", {"resources": {"requests": {"example.com/nic": 1}, "limits": {"example.com/nic": 2}}}),
    ("not set", {"resources": {"requests": {"example.com/nic": 1}}}),
    ("claims", {"resources": {"claims": [{"name": "gpu"}]}}),
    *(
        ("valueFrom", {"env": [{"name": "A", "valueFrom": source}]})
        for source in ({}, {"secretKeyRef": {"name": "s"}}, {"secretRef": {"name": "s", "key": "k"}})
    ),
    *(
        ("extraVolumes", {"extraVolumes": [{"name": "a", **source}]})
        for source in (
            {"emptyDirr": {}},
            {"emptyDir": {"sizeLimit": "5 GB"}},
            {"hostPath": {}},
            {"persistentVolumeClaim": {"claim": "x"}},
        )
    ),
    ("readonly", {"extraVolumeMounts": [{"name": "cache", "mountPath": "/x", "readonly": True}]}),
    ("imagePullSecrets", {"imagePullSecrets": [{"name": "a", "x": 1}]}),
    ("mem", {"resources": {"limits": {"mem": "1Gi"}}}),
    ("gpus is 1 with 1 nodes, and args have 2 ranks", {"args": ["--tensor-parallel-size=2"]}),
    ("args have 4 ranks", {"gpus": 2, "args": ["-tp", 2, "--pipeline_parallel_size", "2"]}),
    ("--tensor-parallel-size=4", {"gpus": 4}),
    ("gpus is 2 with 2 nodes", {"gpus": 2, "nodes": 2, "clusterKeySecret": "a", "args": ["--data-parallel-size=2"]}),
    ("2 pods share the claim", {"replicas": 2, "cache": {"size": "5Gi"}}),
    ("4 pods share", {"autoscaling": {"enabled": True}, "cache": {"size": "5Gi", "accessModes": ["ReadWriteOncePod"]}}),
    ("2 pods", {"nodes": 2, "gpus": 0, "clusterKeySecret": "a", "cache": {"size": "5Gi"}}),
    ("tolerations", {"tolerations": [{"key": "a", "operator": "Exist"}]}),
    ("tolerations", {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}),
    ("tolerations", {"tolerations": [{"effect": "NoSchedule"}]}),
    ("tolerations", {"tolerations": [{"key": "a", "effect": "NoRun"}]}),
    ("tolerations", {"tolerations": [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5}]}),
    ("tolerations", {"tolerations": [{"key": "a", "value": True}]}),
    ("affinity", {"affinity": {"nodeAffinty": {}}}),
    ("affinity", {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}}}),
    *(
        (
            "affinity",
            {
                "affinity": {
                    "nodeAffinity": {PREFERRED: [{"weight": weight, "preference": {"matchExpressions": [one]}}]}
                }
            },
        )
        for weight, one in (
            (0, {"key": "a", "operator": "Exists"}),
            (1, {"key": "a", "operator": "In"}),
            (1, {"key": "a", "operator": "Exists", "values": ["b"]}),
            (1, {"key": "a", "operator": "Gt", "values": ["b"]}),
            (1, {"key": "a", "operator": "Is", "values": ["b"]}),
            (1, {"key": "a b", "operator": "Exists"}),
        )
    ),
    ("affinity", {"affinity": {"podAffinity": {REQUIRED: [{"labelSelector": {}}]}}}),
    ("affinity", {"affinity": {"podAntiAffinity": {REQUIRED: [{"topologyKey": "a", "labelSelectors": {}}]}}}),
    ("nvidia.com/gpu", {"resources": {"limits": {"nvidia.com/gpu": 4}}}),
    ("gpuResource", {"gpuResource": "gpu"}),
    ("podLabels", {"podLabels": {"a": 1}}),
    ("podLabels", {"podLabels": {"a": "two words"}}),
    ("a b", {"nodeSelector": {"a b": "c"}}),
    ("env", {"env": [{"name": "A", "value": 1}]}),
    ("env", {"env": [{"name": "A=B"}]}),
    ("env", {"env": [{"name": "A", "value": "1", "valueFrom": {}}]}),
    ("env has A twice", {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}),
    ("POD_IP", {"env": [{"name": "POD_IP", "value": "1"}]}),
    ("HF_TOKEN", {"env": [{"name": "HF_TOKEN", "value": "1"}], "hfTokenSecret": "hub"}),
    ("apiKeySecret", {"apiKeySecret": "my secret"}),
    ("serviceAccountName", {"serviceAccountName": "-a"}),
    ("servedModelNames", {"servedModelNames": [""]}),
    ("servedModelNames", {"servedModelNames": ["--port=9"]}),
    ("servedModelNames", {"servedModelNames": ["a", "a"]}),
    ("model", {"model": "--port=9"}),
    ("value port", {"args": ["--port=9"]}),
    ("value adminKeySecret", {"args": ["--admin_key", "9"]}),
    ("value port", {"args": ["--max-model-len", "9", "--port", 9]}),
    ("value apiKeySecret", {"args": ["--api-key=secret"]}),
    ("value nodes", {"args": ["--headless"]}),
    ("address of the pod", {"args": ["--host=127.0.0.1"]}),
    ("ask http", {"args": ["--ssl-certfile", "/tls/tls.crt"]}),
    ("value model", {"args": ["--model=a"], "model": "b"}),
    ("value servedModelNames", {"args": ["--served-model-name=b"], "servedModelNames": ["a"]}),
    ("value kvEvents", {"args": ["--kv-events-config={}"], "kvEvents": {"enabled": True}}),
    ("interval", {"podMonitor": {"enabled": True, "interval": "15"}}),
    ("interval", {"podMonitor": {"enabled": True, "interval": "0s"}}),
    ("extraVolumes has cache", {"extraVolumes": [{"name": "cache", "emptyDir": {}}]}),
    ("extraVolumes has a twice", {"extraVolumes": 2 * [{"name": "a", "emptyDir": {}}]}),
    ("extraVolumes", {"extraVolumes": [{"name": "My_models", "emptyDir": {}}]}),
    ("extraVolumes", {"extraVolumes": [{"name": "a"}]}),
    ("extraVolumeMounts has a", {"extraVolumeMounts": [{"name": "a", "mountPath": "/a"}]}),
    ("/cache", {"extraVolumeMounts": [{"name": "cache", "mountPath": "/cache/"}]}),
    ("mountPath", {"extraVolumeMounts": [{"name": "cache", "mountPath": "models"}]}),
    ("startupSeconds", {"startupSeconds": 0}),
    ("shutdownSeconds", {"shutdownSeconds": -1}),
]
"""What an error names, and values."""


@pytest.mark.parametrize(("name", "values"), REFUSED, ids=json.dumps)
def test_values_that_cannot_be_meant_are_refused(name: str, values: dict[str, Any]) -> None:
    from helm_python import HelmError

    with pytest.raises(HelmError, match=re.escape(name)):
        rendered(**values)


def test_flags_that_the_chart_leaves_to_arguments_reach_the_server() -> None:
    args = ["--served-model-name=a", "--kv-events-config={}", "--enable-admin-routes", "--headless-x", "--ported"]
    (workload,) = [one for one in rendered(args=args) if one["kind"] == "Deployment"]
    assert workload["spec"]["template"]["spec"]["containers"][0]["args"][-len(args) :] == args


def test_the_chart_passes_helms_own_linter() -> None:
    import helm_python

    findings = helm_python.lint(str(CHART))
    assert findings["errors"] == [] and [one["severity"] for one in findings["messages"]] == [1]  # it has no icon


def test_examples_of_custom_resources_have_known_fields(tmp_path: Path) -> None:
    kinds: set[str] = set()
    for path in (DEPLOY / "examples").glob("*.yaml"):
        manifests = [one for one in yaml.safe_load_all(path.read_text()) if one and "kind" in one]
        kinds |= check(manifests, tmp_path) if manifests else set()
    assert kinds >= {"LLMInferenceService", "RayService"}


def test_the_image_is_clean_by_hadolint() -> None:
    """But for versions: those of Debian go with the base image, and hadolint does not see those that arguments have."""
    command = [tool("hadolint"), "--ignore", "DL3008", "--ignore", "DL3013", str(DEPLOY / "Dockerfile")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    text = (DEPLOY / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Python :: {re.search(r'ARG PYTHON=(.*)', text)[1]}" in str(project["classifiers"])  # type: ignore[index]
    assert f"torch=={re.search(r'ARG TORCH=(.*)', text)[1]}" in (ROOT / "Makefile").read_text()  # type: ignore[index]


def test_the_compose_file_names_what_is_there() -> None:
    services: dict[str, Any] = {}
    for name in ("compose.yaml", "gpu.yaml"):
        for service, content in yaml.safe_load((DEPLOY / "compose" / name).read_text())["services"].items():
            services[service] = services.get(service, {}) | content
    build = services["fleetfoot"]["build"]
    assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).is_file()
    mounts = [volume for service in services.values() for volume in service.get("volumes", ()) if volume[0] == "."]
    assert mounts and all((DEPLOY / "compose" / mount.partition(":")[0]).is_file() for mount in mounts)
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_the_board_asks_for_metrics_that_exist() -> None:
    from fleetfoot.server import metrics

    board = json.loads((DEPLOY / "compose" / "grafana" / "fleetfoot.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"fleetfoot:(\w+)", target["expr"])
    }
    known = {
        *metrics._GAUGES,
        *(f"{name}_total" for name in metrics._COUNTERS),
        *metrics._HISTOGRAMS,
        "request_success_total",
    }
    known |= {f"{name}{'_total' if kind == 'counter' else ''}" for name, (kind, _) in metrics._LABELLED.items()}
    assert len(asked) > 10
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} <= known
    assert CHART.joinpath("Chart.yaml").read_text().count(f"\nversion: {__version__}\n") == 1
