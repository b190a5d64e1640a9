import pytest

from gnnc.errors import PrecisionError
from gnnc.precision import Precision


@pytest.mark.parametrize(
    ("name", "format", "weight", "activation"),
    [
        ("fp32", "float", 32, 32),
        ("bf16", "float", 16, 16),
        ("int8", "int", 8, 8),
        ("int3", "int", 3, 3),
        ("w4a8", "int", 4, 8),
        ("binary", "binary", 1, 1),
    ],
)
def test_names(name: str, format: str, weight: int, activation: int) -> None:
    parsed = Precision.parse(name)
    assert (parsed.format, parsed.weight_bits, parsed.activation_bits) == (format, weight, activation)
    assert Precision.parse(parsed) is parsed
    assert str(parsed) == name


@pytest.mark.parametrize("name", ["int0", "int99", "w0a8", "quarter", "INT8", 8, None])
def test_unknown_names_are_refused(name: object) -> None:
    with pytest.raises(PrecisionError, match="known names|Known names"):
        Precision.parse(name)  # pyright: ignore[reportArgumentType]
