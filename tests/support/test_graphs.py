import graphs
import pytest
import torch


@pytest.mark.parametrize("name", ["cora", "pubmed", "arxiv"])
@pytest.mark.parametrize("symmetrize", [False, True])
def test_generated_graph_has_the_size_and_skew_of_its_shape(name: str, symmetrize: bool) -> None:
    shape = graphs.SHAPES[name]
    edge_index = graphs.generate(name, symmetrize=symmetrize)
    assert edge_index.shape == (2, shape.edges)
    assert edge_index.min() >= 0
    assert edge_index.max() < shape.nodes
    degree = torch.bincount(edge_index[1], minlength=shape.nodes)
    assert degree.max() > 5 * degree.float().mean()


def test_generated_graph_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = graphs.generate("cora", seed=3)
    torch.manual_seed(2)
    assert torch.equal(first, graphs.generate("cora", seed=3))
    assert not torch.equal(first, graphs.generate("cora", seed=4))


def test_symmetrized_graph_holds_the_reverse_of_each_edge() -> None:
    edge_index = graphs.generate("cora", symmetrize=True)
    ids = edge_index[0] * graphs.SHAPES["cora"].nodes + edge_index[1]
    reverse = edge_index[1] * graphs.SHAPES["cora"].nodes + edge_index[0]
    assert torch.equal(ids.sort().values, reverse.sort().values)


def test_bundled_cora(cora: dict[str, torch.Tensor | int]) -> None:
    x, edge_index, train = cora["x"], cora["edge_index"], cora["train_mask"]
    assert isinstance(x, torch.Tensor) and isinstance(edge_index, torch.Tensor)
    assert x.shape == (2708, 1433)
    assert edge_index.shape == (2, 10_556)
    assert int(train.sum()) == 140
    torch.testing.assert_close(x.sum(1), torch.ones(2708))
