"""The kernel registry: what is planned from facts, and what is loaded from a plan."""

import pickle
from dataclasses import replace
from importlib import import_module

import pytest
from tests.helpers.interpreter import run_python
from tests.helpers.kernels import cpu_kernels, reference_kernels

from fleetfoot.kernels.interface import KernelPlan
from fleetfoot.kernels.registry import OPERATIONS, DeviceFacts, load_kernels, module_path, plan_kernels
from fleetfoot.native.loading import native_problem

CPU, GPU = DeviceFacts("cpu", has_native=True), DeviceFacts("cuda", has_native=True, has_triton=True)


ANY = DeviceFacts("mps", has_native=True, has_triton=True)
PLANNED = [
    (CPU, {"attention": "native", "rms_norm": "native", "prepare_inputs": "torch", "apply_staged_writes": "numpy"}),
    (GPU, {"attention": "triton", "prepare_decode": "triton", "apply_staged_writes": "triton"}),
    (DeviceFacts("cpu", has_triton=True), {"attention": "sdpa", "prepare_decode": "torch"}),
    (DeviceFacts("cuda", has_native=True), {"attention": "sdpa", "apply_staged_writes": "torch"}),
    (ANY, {"rms_norm": "torch"}),
    (replace(GPU, heads=frozenset({(64, 4), (128, 8)})), {"attention": "triton"}),
    (replace(GPU, heads=frozenset({(64, 4), (12, 2)})), {"attention": "sdpa", "rms_norm": "triton"}),
    (replace(GPU, heads=frozenset({(128, 96)})), {"attention": "sdpa"}),
    (replace(GPU, has_layer_chain=True), {"layer_chain": "cuda"}),
    (replace(GPU, has_hopper=True), {"attention": "hopper", "linear_chain": "hopper", "rms_norm": "triton"}),
]


@pytest.mark.parametrize(("facts", "expected"), PLANNED)
def test_the_fastest_that_the_device_supports_is_planned(facts: DeviceFacts, expected: dict[str, str]) -> None:
    assert plan_kernels(facts).items() >= expected.items()


def test_every_operation_has_a_reference_and_every_listed_function_exists() -> None:
    for operation, implementations in OPERATIONS.items():
        assert "sdpa" in implementations if operation == "attention" else "torch" in implementations
        for name, target in implementations.items():
            module, _, attribute = target.partition(":")
            assert hasattr(import_module(module_path(module)), attribute or f"{operation}_{name}"), target


def test_a_plan_is_immutable_picklable_and_printable() -> None:
    plan = plan_kernels(GPU)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(plan_kernels(GPU))
    assert plan.names == ("triton",)
    assert str(plan).startswith("triton: attention, rms_norm, ")
    assert [plan_kernels(facts).is_capturable for facts in (CPU, GPU)] == [False, True]


def test_what_is_loaded_is_what_the_plan_names() -> None:
    kernels = reference_kernels()
    assert (kernels.plan.names, kernels.attention.name) == (("torch", "sdpa"), "sdpa")
    if not native_problem():
        assert (cpu_kernels().plan, cpu_kernels().attention.name) == (plan_kernels(CPU), "native")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm": "cutlass"}, "rms_norm has no implementation 'cutlass'; there are triton, native, torch"),
        ({"gelu": "torch"}, "the kernel plan has .*'gelu'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_kernels(KernelPlan(tuple({**plan_kernels(DeviceFacts("cpu")), **changes}.items())))


def test_planning_imports_no_torch_and_a_cpu_needs_no_triton() -> None:
    script = """
import sys
from fleetfoot.kernels.registry import DeviceFacts, KernelUnavailableError, load_kernels, plan_kernels
cpu, gpu = plan_kernels(DeviceFacts("cpu")), plan_kernels(DeviceFacts("cuda", has_triton=True))
assert "torch" not in sys.modules
sys.modules["triton"] = None  # any import of it fails
print(load_kernels(cpu).plan.names)
try:
    load_kernels(gpu)
except KernelUnavailableError as error:
    print(error)
import fleetfoot.kernels.attention.triton_backend
from tests.helpers.kernels import cpu_kernels
from tests.helpers.prepare_runs import OPS, run
for op in OPS:
    run(cpu_kernels(), op, "one_decode")
"""
    missing = "the plan names 'triton' for attention, but Triton is not installed"
    assert run_python("-c", script).splitlines() == ["('torch', 'cpu', 'numpy', 'sdpa')", missing]
