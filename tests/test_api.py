"""``gnnc.compile`` and ``CompiledModel``: the contract of the public API, on the reference backend."""

import copy
import importlib.metadata
import inspect
import io
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import networkx
import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.nn.models import GCN

import gnnc
from gnnc.passes.pipeline import PIPELINE

NUM_NODES, WIDTH, CLASSES = 30, 16, 5


def graph(seed: int = 0, nodes: int = NUM_NODES, edges: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(nodes, WIDTH, generator=generator),
        torch.randint(nodes, (2, edges), generator=generator),
    )


class Conv(nn.Module):
    """One layer and an activation: the least that has structure and compute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, CLASSES)

    def forward(self, x, edge_index, edge_weight=None):
        return self.conv(x, edge_index, edge_weight).relu()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Conv().eval()


@pytest.fixture(scope="module")
def compiled(model):
    result = gnnc.compile(model, "int8", backend="reference")
    with torch.no_grad():
        result(*graph())
    return result


@torch.no_grad()
def test_result_is_the_models_within_int8(model, compiled):
    for seed, nodes, edges in ((0, NUM_NODES, 120), (1, 11, 40), (2, 200, 900)):
        x, edge_index = graph(seed, nodes, edges)
        expected, actual = model(x, edge_index), compiled(x, edge_index)
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert (actual - expected).norm() <= 0.03 * expected.norm()


@torch.no_grad()
def test_other_sizes_do_not_capture_again(compiled):
    before = len(compiled._dispatch.captures)
    compiled(*graph(3, 17, 1))
    compiled(*graph(3, 17, 0))
    assert len(compiled._dispatch.captures) == before


@torch.no_grad()
def test_keywords_and_optional_arguments(model, compiled):
    x, edge_index = graph()
    expected = compiled(x, edge_index)
    assert torch.equal(compiled(edge_index=edge_index, x=x), expected)
    assert torch.equal(compiled(x, edge_index, None), expected)
    weight = torch.rand(edge_index.shape[1])
    weighted = compiled(x, edge_index, weight)
    reference = model(x, edge_index, weight)
    assert (weighted - reference).norm() <= 0.03 * reference.norm()


class Factor(nn.Module):
    """Gives back constants of the call, in places of its own."""

    def forward(self, x, factor):
        while isinstance(factor, list | tuple | dict | frozenset):
            (factor,) = factor.values() if isinstance(factor, dict) else factor
        return torch.full((x.shape[0],), factor), x.long() * factor


WRAPPED = {
    "bare": lambda value: value,
    "in a tuple": lambda value: (value,),
    "in a dict of lists": lambda value: {"a": [value]},
    "in a set": lambda value: frozenset([value]),
    "in a set of tuples": lambda value: frozenset([(value,)]),
}


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("place", WRAPPED)
def test_equal_constants_of_other_types_have_programs_of_their_own(place):
    compiled, x = gnnc.compile(Factor(), "fp32", backend="reference"), graph()[0]
    for _ in range(2):
        for value in (1, 1.0, True, 2, 2.0):
            argument = WRAPPED[place](value)
            torch.testing.assert_close(compiled(x, argument), compiled.model(x, argument))
    assert len(compiled._dispatch.captures) == 5


def test_it_is_a_module_that_shares_everything_with_the_model(model, compiled):
    assert isinstance(compiled, nn.Module) and isinstance(compiled, gnnc.CompiledModel)
    assert list(compiled.state_dict()) == list(model.state_dict())
    own = dict(compiled.named_parameters())
    assert own.keys() == dict(model.named_parameters()).keys()
    assert all(own[name] is parameter for name, parameter in model.named_parameters())
    assert compiled.conv is model.conv
    assert inspect.signature(compiled) == inspect.signature(model.forward)


def test_mode_is_the_models():
    model = Conv()
    compiled = gnnc.compile(model, backend="reference")
    assert compiled.training
    assert compiled.eval() is compiled
    assert not model.training and not model.conv.training and not compiled.training
    model.train()
    assert compiled.training


@torch.no_grad()
def test_deepcopy_is_independent(compiled):
    x, edge_index = graph()
    expected = compiled(x, edge_index)
    copied = copy.deepcopy(compiled)
    copied.conv.lin.weight.data.zero_()
    assert copied(x, edge_index).abs().sum() == 0
    assert torch.equal(compiled(x, edge_index), expected)


@torch.no_grad()
def test_pickle_makes_another_that_computes_the_same(compiled):
    x, edge_index = graph()
    again = pickle.loads(pickle.dumps(compiled))
    assert torch.equal(again(x, edge_index), compiled(x, edge_index))


def test_outputs_are_never_overwritten(compiled):
    x, edge_index = graph(0, 9000, 100)
    with torch.no_grad():
        first = compiled(x, edge_index)
        kept = first.clone()
        for seed in range(4):
            compiled(torch.full_like(x, seed), edge_index)
    assert torch.equal(first, kept)


def test_threads_agree(compiled):
    inputs = [graph(seed, 60, 300) for seed in range(4)]
    with torch.no_grad():
        expected = [compiled(*given) for given in inputs]
    failures = []

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(compiled(*inputs[index]), expected[index]):
                    failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_static_scales_come_from_example_inputs(model):
    x, edge_index = graph()
    compiled = gnnc.compile(model, "int8", backend="reference", example_inputs=(x, edge_index))
    assert compiled.graph_module is not None
    with torch.no_grad():
        expected = model(x, edge_index)
        assert (compiled(x, edge_index) - expected).norm() <= 0.03 * expected.norm()


def scales_of(compiled: gnnc.CompiledModel) -> list[str]:
    """What ``explain()`` says of scales, a line an op."""
    return sorted(line for line in compiled.explain().splitlines() if "scales" in line)


def stored(value: object) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def hooked(compiled: gnnc.CompiledModel) -> gnnc.CompiledModel:
    compiled.model.register_forward_hook(lambda module, arguments, result: result)
    return compiled


AGAIN: dict[str, Callable[[gnnc.CompiledModel], gnnc.CompiledModel]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda compiled: pickle.loads(pickle.dumps(compiled)),
    "torch.save": stored,
    "copy of a copy": lambda compiled: copy.deepcopy(copy.deepcopy(compiled)),
    "hook": hooked,
}


@pytest.fixture
def static():
    """A model with static scales, and a call of it on a smaller graph than its examples."""
    torch.manual_seed(0)
    model = GCN(64, 64, 2, 64).eval()
    x, edge_index = torch.randn(50, 64), torch.randint(50, (2, 300))
    return gnnc.compile(model, "int8", example_inputs=(x, edge_index)), (x[:40], edge_index % 40)


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("how", AGAIN)
def test_static_scales_stay_in_copies_and_after_changes(static, how):
    compiled, given = static
    expected, scales = compiled(*given), scales_of(compiled)
    again = AGAIN[how](compiled)
    with torch.inference_mode():
        actual = again(*given)
    assert torch.equal(again(*given), actual)
    assert scales_of(again) == scales and any("on the examples" in line for line in scales)
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_a_copy_takes_its_scales_with_the_weights_that_it_has(static):
    compiled, given = static
    copied = copy.deepcopy(compiled)
    for parameter in copied.parameters():
        parameter.mul_(20)
    expected = copied.model(*given)
    assert (copied(*given) - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.slow
@torch.no_grad()
def test_calls_of_another_structure_than_the_examples_take_their_own_scales(static):
    compiled, (x, edge_index) = static
    weight = torch.rand(edge_index.shape[1])
    copied = copy.deepcopy(compiled)
    assert torch.equal(copied(x, edge_index, weight), compiled(x, edge_index, weight))
    assert scales_of(copied) == scales_of(compiled)
    assert torch.equal(copied(x, edge_index), compiled(x, edge_index))
    assert any("on the examples" in line for line in scales_of(copied))


@torch.no_grad()
def test_examples_that_do_not_run_any_more_are_done_without(static):
    compiled, (x, edge_index) = static
    compiled.model.convs[0] = GCNConv(WIDTH, 64)
    expected = compiled.model(x[:, :WIDTH], edge_index)
    actual = compiled(x[:, :WIDTH], edge_index)
    assert (actual - expected).norm() <= 0.05 * expected.norm()
    assert "example_inputs do not run any more" in compiled.explain().split("Captures")[1]


@pytest.mark.slow
@torch.no_grad()
def test_under_autocast_scales_are_taken_at_each_call(static):
    compiled, given = static
    for each in (compiled, copy.deepcopy(compiled)):
        with torch.autocast("cpu", torch.bfloat16):
            expected, actual = compiled.model(*given), each(*given)
        assert (actual - expected).norm() <= 0.05 * expected.norm()
        each(*given)
    assert any("on the examples" in line for line in scales_of(each))


@pytest.mark.slow
@torch.no_grad()
def test_auto_measures_in_a_copy_too(static, rates):
    given = static[1]
    compiled = gnnc.compile(static[0].model, "auto", example_inputs=given, backend="cpu")
    copied = copy.deepcopy(compiled)
    copied(*given)
    assert "no example_inputs" not in copied.explain()


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_static_scales_stay_when_the_model_moves(static):
    compiled, given = static
    scales = scales_of(compiled)
    compiled.cuda()(*[tensor.cuda() for tensor in given])
    assert len(scales_of(compiled)) == len(scales) and any(
        "on the examples" in line for line in scales_of(compiled)
    )


def test_structure_of_outputs_is_kept():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = SAGEConv(WIDTH, CLASSES)

        def forward(self, x, edge_index):
            y = self.conv(x, edge_index)
            return {"out": y, "both": (y.relu(), None), "x": x}

    model = Many().eval()
    with torch.no_grad():
        given = graph()
        actual = gnnc.compile(model, "fp32", backend="reference")(*given)
        expected = model(*given)
    assert actual["both"][1] is None and actual["x"] is given[0]
    torch.testing.assert_close(actual["out"], expected["out"])
    torch.testing.assert_close(actual["both"][0], expected["both"][0])


def test_batch_norm_in_train_mode_updates_its_statistics():
    model = GCN(WIDTH, 8, 2, CLASSES, norm="batch_norm")
    twin = copy.deepcopy(model)
    compiled = gnnc.compile(model, "fp32", backend="reference")
    with torch.no_grad():
        given = graph()
        torch.testing.assert_close(compiled(*given), twin(*given), rtol=1e-4, atol=1e-5)
    for (name, actual), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, msg=name)


def test_inspection(compiled, tmp_path):
    assert str(compiled).startswith("quantized ")
    assert "gemm" in compiled.summary()
    assert "Captures" in compiled.explain()
    assert isinstance(compiled.graph_module, GraphModule)
    assert isinstance(compiled.structure_graph_module, GraphModule)
    assert compiled.backward_graph_module is None
    assert [name for name, _ in compiled.stages] == ["capture", *(step.name for step in PIPELINE)]
    assert isinstance(compiled.to_networkx(), networkx.DiGraph)
    compiled.draw(tmp_path / "program.svg")
    compiled.save_plan(tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["layers"]["conv.lin"] == {"gemm": "int8"}


def test_profile_measures_every_launch(compiled):
    with torch.no_grad():
        table = compiled.profile(*graph())
    assert "measured" in table
    assert compiled._dispatch.last.timings and all(t >= 0 for t in compiled._dispatch.last.timings.values())


@pytest.mark.first(1)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_only_cuda_kernels_cut_a_graph(model, backend):
    compiled = gnnc.compile(model, backend=backend)
    with torch.no_grad():
        with pytest.raises(gnnc.UnsupportedError, match=rf"{backend}.*call it as it is, or .* with \.cuda"):
            compiled.tune(*graph())
        with pytest.raises(gnnc.GraphError):
            compiled.tune(graph()[0], graph()[1].float())
    assert "measured" not in compiled.explain()


def test_clear_cache_keeps_the_program(compiled):
    with torch.no_grad():
        expected = compiled(*graph())
        compiled.clear_cache()
        assert compiled._dispatch.last.executable.arena_bytes == 0
        assert torch.equal(compiled(*graph()), expected)


@pytest.mark.parametrize(
    "look",
    [
        lambda c: c.graph_module,
        lambda c: c.structure_graph_module,
        lambda c: c.backward_graph_module,
        lambda c: c.stages,
        lambda c: c.summary(),
        lambda c: c.explain(),
        lambda c: c.to_networkx(),
        lambda c: c.save_plan("never"),
    ],
)
def test_before_capture_everything_says_what_to_do(model, look):
    with pytest.raises(gnnc.GnncError, match="call the compiled model once, or pass example_inputs"):
        look(gnnc.compile(model, backend="reference"))


def test_before_capture_it_prints(model):
    assert "not captured yet" in str(gnnc.compile(model, backend="reference"))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"precision": "int9000"}, gnnc.PrecisionError, "unknown precision"),
        ({"precision": "intt8"}, gnnc.PrecisionError, "did you mean 'int8'"),
        ({"precision": 8}, gnnc.PrecisionError, "got int"),
        ({"precision": "int4"}, gnnc.UnsupportedError, "not built in this version"),
        ({"overrides": {"conv9*": "fp32"}}, gnnc.PrecisionError, "matches no module"),
        ({"overrides": {"conv": "int4"}}, gnnc.UnsupportedError, "int4"),
        ({"overrides": {"conv": "auto"}}, gnnc.UnsupportedError, "auto chooses for a whole model"),
        ({"overrides": ["conv"]}, gnnc.GnncError, "must be a dict .*, got list"),
        ({"overrides": {0: "fp32"}}, gnnc.GnncError, "path of a module.*, got 0"),
        ({"backend": None}, gnnc.BackendError, "unknown backend None; choose one of"),
        ({"pipeline": None}, gnnc.GnncError, "None is no pass"),
        ({"pipeline": ("raise",)}, gnnc.GnncError, "'raise' is no pass: a pass has a name"),
        (
            {"pipeline": [step for step in PIPELINE if step.name != "lower"]},
            gnnc.GnncError,
            "no pass establishes LOWERED",
        ),
        ({"pipeline": PIPELINE[1:]}, gnnc.GnncError, "no pass establishes NORMALIZED"),
        ({"qat": True}, gnnc.UnsupportedError, "qat"),
        ({"plan": "no such file"}, gnnc.PrecisionError, "plan 'no such file' cannot be read"),
        ({"backend": "tpu"}, gnnc.BackendError, "choose one of"),
        ({"error_budget": -1}, gnnc.GnncError, "error_budget"),
        ({"error_budget": "much"}, gnnc.GnncError, "error_budget"),
        ({"check_finite": "all"}, gnnc.GnncError, "check_finite"),
        ({"cuda_graph": "yes"}, gnnc.GnncError, "cuda_graph"),
    ],
)
def test_options_that_cannot_be_served(model, options, error, match):
    with pytest.raises(error, match=match):
        gnnc.compile(model, **{"backend": "reference", **options})


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused(compiled):
    x, edge_index = graph()
    with pytest.raises(gnnc.InputError, match=r"x is a quantized tensor: pass x\.dequantize\(\)"):
        compiled(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), edge_index)


@pytest.mark.parametrize("thing", [None, lambda x: x, GCNConv, "model"])
def test_not_a_module(thing):
    with pytest.raises(gnnc.GnncError, match="takes a torch.nn.Module"):
        gnnc.compile(thing)


@torch.no_grad()
def test_overrides_change_the_layers_they_name():
    model = GCN(WIDTH, 32, 2, CLASSES).eval()
    compiled = gnnc.compile(model, "int8", backend="reference", overrides={"convs.0*": "fp32"})
    compiled(*graph())
    assigned = {
        node.meta["layer"]: str(node.meta["precision"])
        for node in dict(compiled.stages)["assign"].graph.nodes
        if "gemm" in str(node.target)
    }
    assert assigned == {"convs.0.lin": "fp32", "convs.1.lin": "int8"}


class Around(nn.Module):
    """A model of which a part may be compiled already."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.lin = part, nn.Linear(CLASSES, 2)

    def forward(self, x, edge_index):
        return self.lin(self.part(x, edge_index))


@torch.no_grad()
def test_a_part_that_is_compiled_already_is_compiled_with_the_whole():
    whole = Around(gnnc.compile(GCN(WIDTH, 32, 2, CLASSES).eval(), backend="reference"))
    compiled = gnnc.compile(whole, "fp32", backend="reference")
    plain = Around(whole.part.model)
    plain.lin = whole.lin
    torch.testing.assert_close(compiled(*graph()), plain(*graph()))
    layers = {node.meta["layer"] for node in compiled.graph_module.graph.nodes if node.meta.get("layer")}
    assert {"part.convs.0.lin", "part.convs.1.lin", "lin"} <= layers
    assert sorted(compiled.state_dict()) == sorted(plain.state_dict())


@torch.no_grad()
def test_tuples_of_features_and_sparse_adjacencies():
    torch.manual_seed(0)
    bipartite = SAGEConv((WIDTH, WIDTH), 32).eval()
    x, edge_index = graph()
    given = ((x, x[:9]), torch.stack([edge_index[0], edge_index[1] % 9]))
    expected = bipartite(*given)
    compiled = gnnc.compile(bipartite, "int8", backend="reference")
    for _ in range(2):
        assert (compiled(*given) - expected).norm() <= 0.03 * expected.norm()


@torch.no_grad()
def test_dump_writes_every_stage(model, tmp_path, monkeypatch):
    monkeypatch.setenv("GNNC_DUMP", str(tmp_path))
    gnnc.compile(model, backend="reference")(*graph())
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == len(PIPELINE) + 1


def test_example_inputs_are_a_tuple_of_arguments(model):
    with pytest.raises(gnnc.GnncError, match="must be a tuple"):
        gnnc.compile(model, backend="reference", example_inputs=graph()[0])


@torch.no_grad()
def test_a_call_waits_while_another_thread_captures(model):
    """Tracing puts stand-ins into the model; a call that read them would return nonsense."""
    compiled = gnnc.compile(model, "fp32", backend="reference")
    given = graph()
    expected = compiled(*given)
    weight = torch.rand(given[1].shape[1])
    other = threading.Thread(target=lambda: torch.no_grad()(compiled)(*given, weight))
    other.start()
    wrong = 0
    while other.is_alive():
        wrong += not torch.equal(compiled(*given), expected)
    other.join()
    assert not wrong


def test_the_version_is_that_of_the_package():
    try:
        installed = importlib.metadata.version("gnnc")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gnnc is on the path, and not installed")
    assert gnnc.__version__ == installed


def test_fp8_names_the_hardware_that_it_needs_and_what_to_use() -> None:
    for options in ({"precision": "fp8"}, {"overrides": {"*": "fp8"}}):
        with pytest.raises(gnnc.UnsupportedError, match=r"sm_89 and newer.*use int8.*or bf16"):
            gnnc.compile(torch.nn.Linear(2, 2), **options)  # type: ignore[arg-type]
