"""Inductor with its kernels kept instead of launched: what a graph became, and what it moves.

After `install`, ``torch.compile`` writes Triton kernels for the fake device and compiles them to
binaries. A call of the compiled function runs its graph on fake tensors, so that whole steps can
be traced. `GRAPHS` holds what was compiled, `on_call` is told what ran.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from tests.gpu_proof import fake_cuda, fake_graphs
from tests.gpu_proof.resources import Resources, resources_of

DEFAULTS: tuple[tuple[Any, dict[str, Any]], ...] = (
    # The graphs are to be seen; Triton's own cache keeps the binaries.
    (torch.compiler.config, {"force_disable_caches": True}),
    (
        config,
        {
            "compile_threads": 1,
            "joint_graph_constant_folding": False,  # it would compute on the device
            "use_static_cuda_launcher": False,
        },
    ),
)
"""Settings, changed as defaults: a value that is set holds in one thread, not in autograd's."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a graph, with one binary for each configuration that would be tried."""

    name: str
    binaries: tuple[Resources, ...]


@dataclass
class Graph:
    """A compiled forward or backward graph.

    Attributes:
        name: name of the function that was compiled.
        kernels: Triton kernels that Inductor wrote.
        num_bytes: bytes that these kernels, and calls of other libraries, read and write.
        num_calls: calls of the graph since it was compiled.
    """

    name: str
    backward: bool
    kernels: list[Kernel] = field(default_factory=list)
    num_bytes: int = 0
    num_calls: int = 0


FRAME = re.compile(r"line \d+, in (\w+)")
VARIANT = re.compile(r"_\d+$")
GRAPHS: list[Graph] = []
_open: list[Graph] = []
"""The graph that is being compiled."""
running: list[Graph] = []
"""The graph that runs; operations inside are parts of its kernels."""
on_call: list[Callable[[Graph, Sequence[Any]], None]] = []
"""Functions that are told of each call of a graph."""


def _keep(autotuner: CachingAutotuner) -> None:
    """Record a kernel instead of loading it; stands in for `CachingAutotuner._make_launchers`."""
    binaries = tuple(resources_of(result.kernel) for result in autotuner.compile_results)
    _open[-1].kernels.append(Kernel(autotuner.fn.__name__, binaries))
    autotuner.launchers = []


def _count_bytes(lowering: GraphLowering, *args: Any, _original: Any, **kwargs: Any) -> Any:
    made = _original(lowering, *args, **kwargs)
    _open[-1].num_bytes, _, _ = lowering.count_bytes()
    return made


def _function_name(module: torch.fx.GraphModule) -> str:
    """Return the name of the function that a graph comes from, without its variant's number."""
    for node in module.graph.nodes:
        found = FRAME.search(node.meta.get("stack_trace") or "")
        if found is not None:
            return VARIANT.sub("", found[1])
    return "unknown"


def compile_graph(
    module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """Compile a graph to kernels, and return a function that runs it on fake tensors."""
    # Inductor rewrites the module that it is given.
    traced = copy.deepcopy(module)
    graph = Graph(_function_name(module), bool(options.get("is_backward")))
    for tell in fake_cuda.on_wait if fake_graphs.capturing else ():
        tell("torch.compile")  # which would try kernels, and wait for them
    _open.append(graph)
    try:
        compile_fx.compile_fx_inner(module, inputs, **options)
    finally:
        _open.pop()
    GRAPHS.append(graph)

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        graph.num_calls += 1
        for tell in on_call:
            tell(graph, given)
        running.append(graph)
        try:
            with torch.no_grad():
                return traced(*given)
        finally:
            running.pop()

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def install() -> None:
    """Let ``torch.compile`` compile for the fake device from now on."""
    for module, defaults in DEFAULTS:
        for name, value in defaults.items():
            module._config[name].default = value
    CachingAutotuner._make_launchers = _keep  # type: ignore[method-assign]
    CachingAutotuner._dynamic_scale_rblock = lambda self: None  # type: ignore[method-assign]
    original = GraphLowering._compile_to_module
    GraphLowering._compile_to_module = functools.partialmethod(  # type: ignore[assignment]
        _count_bytes, _original=original
    )
    compile_fx.compile_fx = functools.partial(compile_fx.compile_fx, inner_compile=compile_graph)  # type: ignore[assignment]


@contextlib.contextmanager
def compiled_graphs() -> Iterator[list[Graph]]:
    """Yield the graphs that are compiled inside the block."""
    before = len(GRAPHS)
    found: list[Graph] = []
    try:
        yield found
    finally:
        found += GRAPHS[before:]
